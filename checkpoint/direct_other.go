//go:build !linux

package checkpoint

import (
	"os"
	"unsafe"

	"github.com/spillway-ml/spillway/internal/filesys"
)

func createPart(in filesys.Folder, name string, _ bool) (filesys.File, bool, error) {
	f, err := in.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	return f, false, err
}

func openDirect(filesys.Folder, string) (filesys.File, error) { return nil, nil }

func mapPages(n int64) ([]byte, error) {
	b := make([]byte, n+alignment)
	skip := alignment - int64(uintptr(unsafe.Pointer(&b[0]))%alignment)
	return b[skip : skip+n : skip+n], nil
}

func unmapPages([]byte) error { return nil }
