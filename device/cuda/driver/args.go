package driver

import "unsafe"

// Args packs the parameters of a kernel in C's layout. It is filled once, when an operation is
// bound, and used for many launches.
type Args struct{ buf []byte }

func (a *Args) put(p unsafe.Pointer, size int) {
	for len(a.buf)%size != 0 {
		a.buf = append(a.buf, 0)
	}
	a.buf = append(a.buf, unsafe.Slice((*byte)(p), size)...)
}

// Pointer, Int64, Int32, Uint64, Float32 and Float64 add a parameter of that type.
func (a *Args) Pointer(v Address) *Args { a.put(unsafe.Pointer(&v), 8); return a }
func (a *Args) Int64(v int64) *Args     { a.put(unsafe.Pointer(&v), 8); return a }
func (a *Args) Uint64(v uint64) *Args   { a.put(unsafe.Pointer(&v), 8); return a }
func (a *Args) Int32(v int32) *Args     { a.put(unsafe.Pointer(&v), 4); return a }
func (a *Args) Float32(v float32) *Args { a.put(unsafe.Pointer(&v), 4); return a }
func (a *Args) Float64(v float64) *Args { a.put(unsafe.Pointer(&v), 8); return a }

// Packed returns the address and size of the packed parameters, for Launch.
func (a *Args) Packed() (unsafe.Pointer, uintptr) {
	if len(a.buf) == 0 {
		return nil, 0
	}
	return unsafe.Pointer(&a.buf[0]), uintptr(len(a.buf))
}
