// Package drivertest is a double of the CUDA driver. It runs copies, fills and kernels on the host
// in stream order, and detects errors that a GPU would not report.
//
// Device and page-locked memory are host mappings at their real addresses. New memory is poisoned
// and has inaccessible pages around it. Only stream order, events and values in memory order the
// streams. The double detects accesses outside live allocations, uses after a free, leaks, and
// calls on a thread without a context. It also detects conflicting accesses without an order
// between them; it uses vector clocks, so it finds them in whatever order they ran. Any call can be
// made to fail.
package drivertest
