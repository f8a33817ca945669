// Package graph is the step program: typed buffers, operations with declared
// effects, streams and events. A model is built as a forward program,
// differentiated into forward and backward, and then rewritten by the packages
// above (zero, fsdp, recompute, offload, precision). The package is pure: it
// touches no device, file or network, and imports the standard library only.
//
// Its files, from those that refer to no others to those that use the most:
//
//   - program: types, kinds (with the attributes), port, buffer, op, param, unit, section, program;
//   - what a kind of operation is: target, operand, checker, info (an entry of the kind table),
//     operation (an operation of a program's own), call (a kernel's arguments);
//   - the kind table: info_elem, info_linear and the other info_ files have the entries, info_table
//     has the table; by it check, cost and workspace treat all operations alike, and define makes
//     an operation of a program's own;
//   - derivatives: differ, diff_gradients and derivatives are what diff differentiates with;
//   - the order of execution: region, order, sync, schedule;
//   - the rest builds, rewrites, prints or verifies programs: builder, edit, merge, fuse, role,
//     text, verify.
package graph
