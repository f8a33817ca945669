// Package graph is the step program: typed buffers, operations with declared
// effects, streams and events. A model is built as a forward program,
// differentiated into forward and backward, and then rewritten by the packages
// above (zero, fsdp, recompute, offload, precision). The package is pure: it
// touches no device, file or network, and imports the standard library only.
package graph
