// Package drivertest is a double of the CUDA driver: it runs copies, fills and
// kernels on the host, in stream order, and finds what a GPU would not report.
//
// Device and page-locked memory are mappings of the host at their real
// addresses, poisoned when fresh and with unreadable pages around. Nothing but
// stream order, events and values in memory orders what streams run. The double
// finds accesses out of any live allocation, uses after a free, leaks,
// conflicting accesses that nothing orders (by vector clocks, so whichever way
// they happened to run), and calls on a thread without a context. Any call can
// be told to fail.
package drivertest
