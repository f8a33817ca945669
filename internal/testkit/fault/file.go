package fault

import (
	"fmt"
	"io"
	"sync/atomic"
	"syscall"
)

// File is the file interface of the disk tier.
type File interface {
	io.ReaderAt
	io.WriterAt
}

// FilePlan says which operations of a file fail. Operations are counted from 1; 0 fails none.
type FilePlan struct {
	// Read fails the n-th read with an I/O error.
	Read int64
	// Write fails the n-th write with an I/O error and writes nothing.
	Write int64
	// Full fails the n-th write and all after it with "no space left on device".
	Full int64
	// Short writes half of the n-th write and then fails with "no space left on device".
	Short int64
	// Flip changes a bit in the middle of the n-th write's data without an error, like damage on
	// the disk.
	Flip int64
}

// WrapFile returns f with faults.
func WrapFile(f File, plan FilePlan) *FaultyFile { return &FaultyFile{file: f, plan: plan} }

// FaultyFile is a File with faults. Its operations may run concurrently.
type FaultyFile struct {
	file          File
	plan          FilePlan
	reads, writes atomic.Int64
	fired         atomic.Bool
}

// Fired reports whether a planned operation was reached.
func (f *FaultyFile) Fired() bool { return f.fired.Load() }

// ReadAt reads, or fails.
func (f *FaultyFile) ReadAt(b []byte, off int64) (int, error) {
	if f.reads.Add(1) == f.plan.Read {
		f.fired.Store(true)
		return 0, fmt.Errorf("%w: %w", ErrInjected, syscall.EIO)
	}
	return f.file.ReadAt(b, off)
}

// WriteAt writes, fails, or writes damaged data.
func (f *FaultyFile) WriteAt(b []byte, off int64) (int, error) {
	n := f.writes.Add(1)
	fail := func(done int, err error) (int, error) {
		f.fired.Store(true)
		return done, fmt.Errorf("%w: %w", ErrInjected, err)
	}
	switch {
	case n == f.plan.Write:
		return fail(0, syscall.EIO)
	case f.plan.Full > 0 && n >= f.plan.Full:
		return fail(0, syscall.ENOSPC)
	case n == f.plan.Short:
		half := len(b) / 2 / 4096 * 4096
		if half > 0 {
			var err error
			if half, err = f.file.WriteAt(b[:half], off); err != nil {
				return half, err
			}
		}
		return fail(half, syscall.ENOSPC)
	case n == f.plan.Flip && len(b) > 0:
		// The caller's bytes must not change, and direct I/O needs their alignment: the damage is
		// written in place and undone.
		f.fired.Store(true)
		i := len(b) / 2
		b[i] ^= 0x10
		done, err := f.file.WriteAt(b, off)
		b[i] ^= 0x10
		return done, err
	}
	return f.file.WriteAt(b, off)
}
