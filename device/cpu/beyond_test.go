package cpu

import "unsafe"

// beyond returns the address of the i-th byte from b's start, without a bounds check.
func beyond(b []byte, i int) *byte {
	return (*byte)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(b)), i))
}
