package mpi

import "fmt"

// UnendedError says that a process ended without MPI_Finalize, and why. The job's work is
// complete, because processes only finalize after it, but a launcher may report a failure.
type UnendedError struct {
	Rank int // the process's rank as numbered by the launcher
	Why  string
}

func (e *UnendedError) Error() string {
	return fmt.Sprintf("process %d leaves MPI without its end: %s", e.Rank, e.Why)
}
