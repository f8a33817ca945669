package mpi

import "fmt"

// UnendedError says that a process left MPI without its end, and why. What the job was for
// is done: the processes meet there only to part, and a launcher may take it for a failure.
type UnendedError struct {
	Rank int // of the process, in the launcher's numbers
	Why  string
}

func (e *UnendedError) Error() string {
	return fmt.Sprintf("process %d leaves MPI without its end: %s", e.Rank, e.Why)
}
