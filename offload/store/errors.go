package store

import (
	"errors"
	"fmt"
	"os"
)

// Error is a failure of the disk tier while it makes or uses its file.
type Error struct {
	Op   string // create, lock, preallocate, read, write, …
	File string // the path in Options, also if the file has no name any more
	Off  int64  // byte offset in the file
	Len  int64  // bytes; negative: the error concerns the whole file
	Err  error
}

func (e *Error) Error() string {
	if e.Len < 0 {
		return fmt.Sprintf("disk tier: %s %s: %v", e.Op, e.File, e.Err)
	}
	return fmt.Sprintf("disk tier: %s %d bytes at byte %d of %s: %v", e.Op, e.Len, e.Off, e.File, e.Err)
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Corrupt is the cause of an Error if a block's checksum (CRC32C, Castagnoli) differs from the
// one computed when the block was written.
type Corrupt struct{ Want, Got uint32 }

func (c *Corrupt) Error() string {
	return fmt.Sprintf("checksum mismatch: expected CRC32C %08x, found %08x; the bytes changed since they were written", c.Want, c.Got)
}

// cause removes the wrapper that package os adds to a system call's error, because Error already
// names the operation, file and offset.
func cause(err error) error {
	if p, ok := errors.AsType[*os.PathError](err); ok {
		return p.Err
	}
	if s, ok := errors.AsType[*os.SyscallError](err); ok {
		return s.Err
	}
	return err
}
