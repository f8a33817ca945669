package store

import (
	"errors"
	"fmt"
	"os"
)

// Error is a failure of the disk tier while it makes or uses its file.
type Error struct {
	Op   string // create, lock, preallocate, read, write, …
	File string // as Options say, also where the file has no name any more
	Off  int64  // byte of the file
	Len  int64  // bytes; negative: the failure is the file's as a whole
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

// Corrupt is the cause of an Error where a block's checksum (CRC32C, Castagnoli)
// is not what it was when the block was written.
type Corrupt struct{ Want, Got uint32 }

func (c *Corrupt) Error() string {
	return fmt.Sprintf("checksum mismatch: expected CRC32C %08x, found %08x; the bytes changed since they were written", c.Want, c.Got)
}

// cause strips what os puts around a system call's error: our own error names
// operation, file and offset already.
func cause(err error) error {
	var p *os.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	var s *os.SyscallError
	if errors.As(err, &s) {
		return s.Err
	}
	return err
}
