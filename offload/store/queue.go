package store

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-ml/spillway/internal/crash"
)

// queue is the workers that all files of a folder share: the device that they
// lie on is one. Each worker has one request in flight; blocking calls from
// goroutines reach what an asynchronous interface (io_uring) reaches at the
// same depth, see benchmarks/disk.
type queue struct {
	jobs    chan job      // never closed: a rank that is late may still send
	closed  chan struct{} // nobody sends any more
	workers sync.WaitGroup
	memory  []byte // of all workers' buffers
	grace   time.Duration
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
	q := &queue{jobs: make(chan job, 4*o.Depth), closed: make(chan struct{}), grace: closeGrace}
	if o.grace > 0 {
		q.grace = o.grace
	}
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
	defer crash.Guard()
	defer q.workers.Done()
	defer w.coder.close()
	for {
		select {
		case j := <-q.jobs:
			j.t.do(w, j.piece)
		case <-q.closed:
			select {
			case j := <-q.jobs: // sent before
				j.t.do(w, j.piece)
			default:
				return
			}
		}
	}
}

// send gives a piece to the workers; false after close.
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

// closeGrace is how long close waits for requests that the system does not end.
const closeGrace = 10 * time.Second

// close ends the workers. Where one is in a request that does not end, everything
// that it uses stays as it is: it may come back at any time.
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
		return unmapPages(q.memory)
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
		if !t.file.queue.send(job{t, i}) {
			t.end(i, t.file.errClosed(t.off, t.n))
		}
	}
	<-t.done
	return t.err
}

// do works on the transfer's part of a block.
func (t *transfer) do(w *worker, block int64) {
	var err error
	if !t.failed.Load() {
		err = t.piece(w, block)
	}
	t.end(block, err)
}

// piece moves the transfer's part of a block. A panic, which is a broken invariant,
// is its error.
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

// end counts a piece as done, with its error.
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
