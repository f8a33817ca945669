//go:build unix && !linux

package filesys

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// Direct exists only on Linux; it has no effect here.
const Direct = 0

const unnamed = 0

func openSub(at int, name string) (int, error) { return openSubPlain(at, name) }

// renameNew renames a folder to a name that the caller found free.
func renameNew(at int, from, to string) error { return unix.Renameat(at, from, at, to) }

func allocate(f *os.File, size int64) error { return f.Truncate(size) }

func room(int) (Room, error) { return Room{}, errors.ErrUnsupported }
