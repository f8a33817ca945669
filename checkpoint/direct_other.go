//go:build !linux

package checkpoint

import (
	"os"
	"unsafe"
)

func createPart(path string, _ bool) (*os.File, bool, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	return f, false, err
}

func openDirect(string) (*os.File, error) { return nil, nil }

func reserve(f *os.File, size int64) error { return f.Truncate(size) }

func mapPages(n int64) ([]byte, error) {
	b := make([]byte, n+alignment)
	skip := alignment - int64(uintptr(unsafe.Pointer(&b[0]))%alignment)
	return b[skip : skip+n : skip+n], nil
}

func unmapPages([]byte) error { return nil }
