// Package shm is communication between the processes of one host. Every rank's
// arenas lie in memory without a name (memfd) that all processes map, so that a
// collective reads its peers' buffers in place, as between the ranks of one
// process, and adds them in the same order. A job's files are inherited by its
// processes; when the last of them has ended, however it ended, nothing of them
// is left. Arenas lie in huge pages where the system gives them, also where its
// setting for shared memory is "never".
//
// A rank that waits spins for a moment, where every rank of the job has a core, and then
// sleeps in the kernel (futex).
// Nobody waits with a deadline of its own: each process watches the progress and
// the heartbeats of all ranks (package watch), and its verdict ends every wait.
package shm
