//go:build !linux

package filesys

import (
	"errors"
	"os"
	"unsafe"
)

func createDirect(in Folder, name string, _ bool) (File, bool, error) {
	f, err := in.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	return f, false, err
}

// OpenDirect returns nil: there is no direct I/O.
func OpenDirect(Folder, string) (File, error) { return nil, nil }

// ThroughCache is for files of OpenDirect.
func ThroughCache(File) error { return errors.ErrUnsupported }

func mapPages(n int64) ([]byte, error) {
	b := make([]byte, n+Alignment)
	skip := Alignment - int64(uintptr(unsafe.Pointer(&b[0]))%Alignment)
	return b[skip : skip+n : skip+n], nil
}

func unmapPages([]byte) error { return nil }
