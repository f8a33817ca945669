package store

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-ml/spillway/internal/crash"
	"github.com/spillway-ml/spillway/internal/filesys"
)

// queue is the set of workers that all files of a folder share, because the files share a disk.
// Each worker has one request in flight. Blocking calls from goroutines are as fast as an
// asynchronous interface (io_uring) with the same depth, see benchmarks/disk.
type queue struct {
	jobs    chan job      // never closed, because a late rank may still send
	closed  chan struct{} // closed when no more jobs are accepted
	workers sync.WaitGroup
	memory  []byte // of all workers' buffers
	grace   time.Duration
}

type job struct {
	t     *transfer
	piece int64
}

// worker is one worker's scratch memory. Both buffers are page-aligned.
type worker struct {
	buf    []byte // Options.Block bytes: for transfers that are not aligned for direct I/O
	packed []byte // with a codec: an encoded block
	coder  coder
}

func newQueue(o Options) (*queue, error) {
	q := &queue{jobs: make(chan job, 4*o.Depth), closed: make(chan struct{}), grace: closeGrace}
	if o.grace > 0 {
		q.grace = o.grace
	}
	var err error
	if q.memory, err = filesys.MapPages(int64(o.Depth * o.Block * o.Codec.buffers())); err != nil {
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
		q.workers.Go(func() { q.work(w) })
	}
	return q, nil
}

func (q *queue) work(w *worker) {
	defer crash.Guard()
	defer w.coder.close()
	for {
		select {
		case j := <-q.jobs:
			j.t.do(w, j.piece)
		case <-q.closed:
			select {
			case j := <-q.jobs: // sent before the queue was closed
				j.t.do(w, j.piece)
			default:
				return
			}
		}
	}
}

// send gives a job to the workers; it returns false after close.
func (q *queue) send(j job) bool {
	select {
	case <-q.closed:
		return false
	default:
	}
	select {
	case q.jobs <- j:
		return true
	case <-q.closed:
		return false
	}
}

// closeGrace is how long close waits for requests that the system does not complete.
const closeGrace = 10 * time.Second

// close ends the workers. If a worker is in a request that does not complete, the memory that it
// uses stays mapped, since the request may still complete at any time.
func (q *queue) close() error {
	close(q.closed)
	ended := make(chan struct{})
	go func() {
		defer crash.Guard()
		q.workers.Wait()
		close(ended)
	}()
	select {
	case <-ended:
		return filesys.UnmapPages(q.memory)
	case <-time.After(q.grace):
		return fmt.Errorf("disk tier: close: a request is still running after %v; its memory is left mapped", q.grace)
	}
}

type verb uint8

const (
	load verb = iota
	save
	fill
)

// transfer is a bound transfer of n bytes at off. It implements device.Transfer.
type transfer struct {
	file   *File
	verb   verb
	mem    []byte // nil for fill
	off, n int64
	value  byte // for fill

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

// Run divides the transfer at blocks, gives the pieces to the workers and waits for them. After
// a failure no further pieces are started. The error is that of the failed piece with the lowest
// offset.
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
		if !t.file.queue.send(job{t, i}) {
			t.end(i, t.file.errClosed(t.off, t.n))
		}
	}
	<-t.done
	return t.err
}

// do processes the transfer's piece in a block and records its result.
func (t *transfer) do(w *worker, block int64) {
	var err error
	if !t.failed.Load() {
		err = t.piece(w, block)
	}
	t.end(block, err)
}

// piece transfers the piece in a block. A panic, which means a broken invariant, is returned as an
// error.
func (t *transfer) piece(w *worker, block int64) (err error) {
	if !t.file.enter() {
		return t.file.errClosed(t.off, t.n)
	}
	defer t.file.leave()
	defer func() {
		if r := recover(); r != nil {
			err = &Error{Op: "move", File: t.file.name, Off: t.off, Len: t.n, Err: fmt.Errorf("broken invariant: %v", r)}
		}
	}()
	from := max(t.off, block*t.file.block)
	to := min(t.off+t.n, (block+1)*t.file.block)
	var mem []byte
	if t.mem != nil {
		mem = t.mem[from-t.off : to-t.off]
	}
	if t.verb == load {
		return t.file.read(w, mem, from)
	}
	return t.file.write(w, mem, from, to-from, t.value)
}

// end records that a piece is done, and its error.
func (t *transfer) end(block int64, err error) {
	if err != nil {
		at := max(t.off, block*t.file.block)
		t.mu.Lock()
		if t.err == nil || at < t.errAt {
			t.err, t.errAt = err, at
		}
		t.mu.Unlock()
		t.failed.Store(true)
	}
	if t.left.Add(-1) == 0 {
		t.done <- struct{}{}
	}
}
