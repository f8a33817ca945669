package cpu

import "fmt"

// PinError says that the system refused to lock host memory.
type PinError struct {
	Bytes  int64  // size of the memory to lock
	Advice string // the limit and how to raise it
	Err    error
}

func (e *PinError) Error() string {
	return fmt.Sprintf("locking %d bytes of host memory is refused (%v): %s", e.Bytes, e.Err, e.Advice)
}

// Unwrap returns the system's error.
func (e *PinError) Unwrap() error { return e.Err }
