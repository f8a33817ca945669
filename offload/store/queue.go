package store

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// queue is the workers that all files of a folder share: the device that they
// lie on is one. Each worker has one request in flight; blocking calls from
// goroutines reach what an asynchronous interface (io_uring) reaches at the
// same depth, see benchmarks/disk.
type queue struct {
	jobs    chan job
	workers sync.WaitGroup
	memory  []byte // of all workers' buffers
}

type job struct {
	t     *transfer
	piece int64
}

// worker is one worker's scratch. Both buffers are page-aligned.
type worker struct {
	buf    []byte // Options.Block bytes: what can't go straight to or from memory
	packed []byte // with a codec: an encoded block
	coder  coder
}

func newQueue(o Options) (*queue, error) {
	q := &queue{jobs: make(chan job, 4*o.Depth)}
	var err error
	if q.memory, err = mapPages(o.Depth * o.Block * o.Codec.buffers()); err != nil {
		return nil, err
	}
	rest := q.memory
	buffer := func() (b []byte) {
		b, rest = rest[:o.Block:o.Block], rest[o.Block:]
		return b
	}
	for range o.Depth {
		w := &worker{buf: buffer()}
		if o.Codec != None {
			w.packed = buffer()
			if w.coder, err = o.Codec.open(); err != nil {
				return nil, errors.Join(err, q.close())
			}
		}
		q.workers.Add(1)
		go q.work(w)
	}
	return q, nil
}

func (q *queue) work(w *worker) {
	defer q.workers.Done()
	defer w.coder.close()
	for j := range q.jobs {
		j.t.do(w, j.piece)
	}
}

// closeGrace is how long close waits for requests that the system does not end.
const closeGrace = 10 * time.Second

func (q *queue) close() error {
	close(q.jobs)
	ended := make(chan struct{})
	go func() {
		q.workers.Wait()
		close(ended)
	}()
	select {
	case <-ended:
		return unmapPages(q.memory)
	case <-time.After(closeGrace):
		return fmt.Errorf("disk tier: close: a request is still running after %v; its memory is left mapped", closeGrace)
	}
}

type verb uint8

const (
	load verb = iota
	save
	fill
)

// transfer is a bound movement of n bytes at off. It implements
// device.Transfer.
type transfer struct {
	file   *File
	verb   verb
	mem    []byte // nil for fill
	off, n int64
	value  byte // of fill

	left   atomic.Int64
	failed atomic.Bool
	done   chan struct{}
	mu     sync.Mutex
	err    error
	errAt  int64
}

func (f *File) bind(v verb, mem []byte, off, n int64, value byte) *transfer {
	return &transfer{file: f, verb: v, mem: mem, off: off, n: n, value: value, done: make(chan struct{}, 1)}
}

// Run gives the pieces to the workers and waits for them. After a failure
// pieces that have not started are left out; the error is that of the lowest
// offset among those that failed.
func (t *transfer) Run() error {
	if t.n == 0 {
		return nil
	}
	if err := t.file.check(t.off, t.n); err != nil {
		return err
	}
	block := t.file.block
	first, last := t.off/block, (t.off+t.n-1)/block
	t.err = nil
	t.failed.Store(false)
	t.left.Store(last - first + 1)
	for i := first; i <= last; i++ {
		t.file.queue.jobs <- job{t, i}
	}
	<-t.done
	return t.err
}

// do works on the transfer's part of a block.
func (t *transfer) do(w *worker, block int64) {
	if !t.failed.Load() {
		from := max(t.off, block*t.file.block)
		to := min(t.off+t.n, (block+1)*t.file.block)
		var mem []byte
		if t.mem != nil {
			mem = t.mem[from-t.off : to-t.off]
		}
		var err error
		if t.verb == load {
			err = t.file.read(w, mem, from)
		} else {
			err = t.file.write(w, mem, from, to-from, t.value)
		}
		if err != nil {
			t.mu.Lock()
			if t.err == nil || from < t.errAt {
				t.err, t.errAt = err, from
			}
			t.mu.Unlock()
			t.failed.Store(true)
		}
	}
	if t.left.Add(-1) == 0 {
		t.done <- struct{}{}
	}
}
