// Package mpi is communication over the cluster's own MPI, which is opened at run
// time: Open MPI, MPICH and what shares its interface, or a library of the MPI 5
// ABI. MPI moves bytes; Spillway adds them, in its own order.
//
// All calls come from one thread of the process (engine), which polls what is
// under way and backs off where nothing moves: MPI makes progress only inside
// calls. Operations are made of non-blocking messages between pairs of ranks, so
// that the groups of a mesh, the watchdog's heartbeats and the leader's streams
// need no communicators of their own, and no message is larger than 1 GiB.
package mpi
