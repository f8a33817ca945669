package driver

import "fmt"

// Error is a failed call of the driver or of a CUDA library.
type Error struct {
	Call string // "cuMemAlloc_v2"
	Code int
	Name string // "CUDA_ERROR_OUT_OF_MEMORY"
	Text string // the library's description; may be empty
}

func (e *Error) Error() string {
	if e.Text == "" {
		return fmt.Sprintf("%s: %s (%d)", e.Call, e.Name, e.Code)
	}
	return fmt.Sprintf("%s: %s (%d): %s", e.Call, e.Name, e.Code, e.Text)
}
