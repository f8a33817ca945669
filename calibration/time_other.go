//go:build !unix

package calibration

// processTime is unknown on this system.
func processTime() float64 { return 0 }
