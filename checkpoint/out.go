package checkpoint

import (
	"errors"
	"io"
	"sync"

	"github.com/spillway-ml/spillway/internal/crash"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/safetensors"
)

// out is a file to which several blocks are written concurrently.
type out struct {
	f      filesys.File
	size   int64
	direct bool
	blocks chan block
	done   sync.WaitGroup

	mu  sync.Mutex
	err error // the first error of a write
}

// block is n bytes of the file from byte at on. b has room up to the next multiple of
// alignment, which may be written too. Afterwards b goes back to free.
type block struct {
	at   int64
	b    []byte
	n    int64
	free chan []byte
}

func openOut(in filesys.Folder, name string, l safetensors.Layout) (*out, error) {
	f, direct, err := createPart(in, name, l.Size >= directBytes)
	if err != nil {
		return nil, err
	}
	if err := f.Allocate(l.Size); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	o := &out{f: f, size: l.Size, direct: direct, blocks: make(chan block)}
	for range depth {
		o.done.Go(o.write)
	}
	return o, nil
}

// write writes blocks until there are no more.
func (o *out) write() {
	defer crash.Guard()
	for b := range o.blocks {
		n := b.n
		if o.direct {
			n = min(roundUp(n), int64(len(b.b)))
		}
		if o.failed() == nil {
			o.fail(o.put(b.b[:n], b.at))
		}
		if b.free != nil {
			b.free <- b.b
		}
	}
}

func (o *out) put(b []byte, at int64) error {
	n, err := o.f.WriteAt(b, at)
	if err == nil && n != len(b) {
		err = io.ErrShortWrite
	}
	return err
}

func (o *out) fail(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err == nil {
		o.err = err
	}
}

func (o *out) failed() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.err
}

// wait waits for all blocks to be written.
func (o *out) wait() error {
	close(o.blocks)
	o.done.Wait()
	return o.failed()
}

// finish writes the header and makes the file durable, unless there was an earlier error, and
// closes the file.
func (o *out) finish(header []byte, before error) error {
	if before != nil {
		return errors.Join(before, o.f.Close())
	}
	memory, err := mapMemory(int64(len(header)))
	if err == nil {
		copy(memory, header)
		err = o.put(memory, 0)
	}
	if err == nil && o.direct { // the last block was written to its end
		err = o.f.Truncate(o.size)
	}
	if err == nil {
		err = o.f.Sync()
	}
	return errors.Join(err, o.f.Close(), unmapMemory(memory))
}

// mapMemory returns n bytes of zeros that begin at a multiple of alignment.
func mapMemory(n int64) ([]byte, error) {
	if n == 0 {
		return nil, nil
	}
	return mapPages(n)
}

func unmapMemory(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	return unmapPages(b)
}
