// Package shm is the transport between processes of one host. Every rank's arenas are in anonymous
// shared memory (memfd) that all processes map. So a collective reads its peers' buffers in place
// and adds them in the same order as between the ranks of one process. The job's processes inherit
// its memfd files. The kernel frees the memory when the last process has ended, even after a crash.
// Arenas use huge pages where available, even if the system's setting for shared memory is "never".
//
// A waiting rank spins briefly if every rank of the job has a core, and then sleeps in the
// kernel (futex). Waits have no deadlines: each process watches the progress and the heartbeats
// of all ranks (package watch), and an error that it finds ends every wait.
package shm
