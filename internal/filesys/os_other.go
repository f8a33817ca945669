//go:build !linux

package filesys

import (
	"errors"
	"os"
)

// Direct is a flag of Linux alone.
const Direct = 0

// renameNew renames a folder to a name that the caller found free.
func renameNew(from, to string) error { return os.Rename(from, to) }

func allocate(f *os.File, size int64) error { return f.Truncate(size) }

func room(string) (Room, error) { return Room{}, errors.ErrUnsupported }
