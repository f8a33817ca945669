//go:build !unix

package data

import (
	"io"
	"os"
)

// mapFile reads the file instead: this system has no mmap here.
func mapFile(f *os.File, size int64) ([]byte, func() error, error) {
	data := make([]byte, size)
	if _, err := f.ReadAt(data, 0); err != nil && err != io.EOF {
		return nil, nil, err
	}
	return data, nil, nil
}

// dropName leaves the removal for after the file is closed: open files keep
// their names on this system.
func dropName(f *os.File) (after func(), err error) {
	return func() { os.Remove(f.Name()) }, nil
}
