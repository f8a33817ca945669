package filesys

import (
	"errors"
	"io"
	"sync"

	"github.com/spillway-ml/spillway/internal/crash"
)

// Blocks is a new file to which several blocks are written concurrently, a large one past the page
// cache.
type Blocks struct {
	f      File
	size   int64
	direct bool
	blocks chan Block
	done   sync.WaitGroup

	mu  sync.Mutex
	err error // the first error of a write
}

// Block is N bytes of the file, starting at byte At. B has room up to the next multiple of
// Alignment, and these bytes may be written too. After the write B is sent to Free, unless Free is
// nil.
type Block struct {
	At   int64
	B    []byte
	N    int64
	Free chan []byte
}

// CreateBlocks creates a file of size bytes.
func CreateBlocks(in Folder, name string, size int64) (*Blocks, error) {
	f, direct, err := createDirect(in, name, size >= DirectBytes)
	if err != nil {
		return nil, err
	}
	if err := f.Allocate(size); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	o := &Blocks{f: f, size: size, direct: direct, blocks: make(chan Block)}
	for range Depth {
		o.done.Go(o.write)
	}
	return o, nil
}

// write writes blocks until there are no more.
func (o *Blocks) write() {
	defer crash.Guard()
	for b := range o.blocks {
		n := b.N
		if o.direct {
			n = min(RoundUp(n), int64(len(b.B)))
		}
		if o.Failed() == nil {
			o.fail(o.put(b.B[:n], b.At))
		}
		if b.Free != nil {
			b.Free <- b.B
		}
	}
}

// Put queues a block and waits while Depth blocks are being written.
func (o *Blocks) Put(b Block) { o.blocks <- b }

func (o *Blocks) put(b []byte, at int64) error {
	n, err := o.f.WriteAt(b, at)
	if err == nil && n != len(b) {
		err = io.ErrShortWrite
	}
	return err
}

func (o *Blocks) fail(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err == nil {
		o.err = err
	}
}

// Failed returns the first error of a write.
func (o *Blocks) Failed() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.err
}

// Wait waits for all blocks to be written.
func (o *Blocks) Wait() error {
	close(o.blocks)
	o.done.Wait()
	return o.Failed()
}

// Finish writes the header and makes the file durable, unless there was an earlier error, and
// closes the file.
func (o *Blocks) Finish(header []byte, before error) error {
	if before != nil {
		return errors.Join(before, o.f.Close())
	}
	memory, err := MapPages(int64(len(header)))
	if err == nil {
		copy(memory, header)
		err = o.put(memory, 0)
	}
	if err == nil && o.direct { // the last block was written up to its aligned end
		err = o.f.Truncate(o.size)
	}
	if err == nil {
		err = o.f.Sync()
	}
	return errors.Join(err, o.f.Close(), UnmapPages(memory))
}

// MapPages returns n bytes of zeros that begin at a multiple of Alignment.
func MapPages(n int64) ([]byte, error) {
	if n == 0 {
		return nil, nil
	}
	return mapPages(n)
}

// UnmapPages frees memory of MapPages.
func UnmapPages(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	return unmapPages(b)
}
