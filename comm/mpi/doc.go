// Package mpi is communication over the cluster's own MPI, which is opened at run
// time: Open MPI, MPICH and what shares its interface, or a library of the MPI 5
// ABI. MPI moves bytes; Spillway adds them, in its own order.
//
// MPI makes progress only inside calls, so one thread of the process (engine) polls what is
// under way and backs off where nothing moves. Calls come one at a time: from that thread,
// and, where the library allows it (MPI_THREAD_SERIALIZED), from who waits for an
// operation, for its first two milliseconds. Where a process has one rank, all-gathers, all-to-alls and
// what is to be summed go by MPI's non-blocking collectives, on a communicator a group, but
// for what is short; everything else, the watchdog's heartbeats and the leader's streams
// among it, is non-blocking messages between pairs. No call moves more than 1 GiB from a
// rank to another.
package mpi
