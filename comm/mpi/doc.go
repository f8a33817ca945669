// Package mpi is the transport over the cluster's own MPI, which it opens at run time: Open
// MPI, MPICH and libraries with MPICH's ABI, or a library with the MPI 5 ABI. MPI moves bytes;
// Spillway adds them in its own fixed order.
//
// MPI makes progress only inside calls, so one thread of the process (engine) polls the
// pending exchanges, and polls less often while nothing moves. Only one thread at a time calls
// MPI: the engine's thread or, if the library allows it (MPI_THREAD_SERIALIZED), a goroutine
// that waits for an operation, for its first two milliseconds.
//
// If each process has one rank, MPI's non-blocking collectives carry all-gathers, all-to-alls
// and the addends of sums, on one communicator for each group; short operations are excepted.
// Everything else, including heartbeats and the leader's streams, is non-blocking messages
// between two ranks. No call moves more than 1 GiB from one rank to another.
package mpi
