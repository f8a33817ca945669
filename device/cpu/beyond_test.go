package cpu

import "unsafe"

// beyond returns the address of the i-th byte of b's memory, unchecked.
func beyond(b []byte, i int) *byte {
	return (*byte)(unsafe.Add(unsafe.Pointer(unsafe.SliceData(b)), i))
}
