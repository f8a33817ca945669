package mpi

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/internal/crash"
)

// Process is this process's MPI.
type Process struct {
	engine  *engine
	unclean atomic.Pointer[string] // why MPI can't be ended in good order: what is left under way
	failed  atomic.Bool            // the job has ended with an error
	streams sync.WaitGroup
}

// Start opens the library that the launcher belongs to, the first of order that
// is there, and joins its world, which must be the launcher's: rank of world. The
// environment variable LibraryVar names another file. timeout is Options.Timeout: MPI_Init,
// which waits for every process, may take initTimes as long.
func Start(order []Family, rank, world int, timeout time.Duration) (*Process, error) {
	own, err := signalsBefore()
	if err = errors.Join(err, patience()); err != nil {
		return nil, err
	}
	l, err := open(order, os.Getenv(LibraryVar))
	if err != nil {
		return nil, err
	}
	if timeout <= 0 {
		timeout = defaultTimeout
	}
	e, err := startInTime(l, rank, world, initTimes*timeout)
	if err = errors.Join(err, own.keep()); err != nil {
		return nil, err
	}
	if l.symbols {
		outlive()
	}
	return &Process{engine: e}, nil
}

// initTimes is how many times the timeout MPI_Init may take: hosts start at different times.
const initTimes = 5

// startInTime starts the engine, or gives up where MPI_Init does not come back: it waits for
// every process of the job, and no heartbeat tells yet of one that has ended before it or is
// stuck; not every launcher does. The process is then to exit.
func startInTime(l *lib, rank, world int, grace time.Duration) (*engine, error) {
	type start struct {
		e   *engine
		err error
	}
	began := make(chan start, 1)
	go func() {
		defer crash.Guard()
		e, err := startEngine(l, rank, world)
		began <- start{e, err}
	}()
	select {
	case s := <-began:
		return s.e, s.err
	case <-time.After(grace):
		return nil, fmt.Errorf("%w: rank %d of %d: MPI_Init has not come back within %v: it waits for every process of the job, and one has ended before it, is stuck or was never started",
			comm.ErrTimeout, rank, world, grace)
	}
}

// About describes the library in a line.
func (p *Process) About() string { return p.engine.lib.path + ": " + p.engine.lib.name }

// The other processes have this long for their part of a good end, each time that one
// waits for them: of a job that has failed, which a host may be cut off from, less.
var (
	closeGrace  = 10 * time.Second // on a busy machine MPI_Finalize took over 3; tests shorten it
	failedGrace = 100 * time.Millisecond
)

func (p *Process) grace() time.Duration {
	if p.failed.Load() {
		return failedGrace
	}
	return closeGrace
}

// leave has MPI not be ended, because of why.
func (p *Process) leave(why string) { p.unclean.CompareAndSwap(nil, &why) }

// Close ends MPI in good order: every process of the job calls it. Where messages
// are left under way, as after an error, it ends nothing, and the process is to
// exit: its launcher then ends the others. An *UnendedError says so of a job that has not
// failed.
func (p *Process) Close() error {
	ended := make(chan struct{})
	go func() {
		defer crash.Guard()
		p.streams.Wait()
		close(ended)
	}()
	grace := p.grace()
	select {
	case <-ended:
	case <-time.After(grace):
		p.leave(fmt.Sprintf("the stream from another process has not ended within %v", grace))
	}
	p.engine.stop <- p.unclean.Load() == nil
	grace = p.grace()
	select {
	case err := <-p.engine.ended:
		if err != nil {
			p.leave(err.Error())
		}
	case <-time.After(grace):
		p.leave(fmt.Sprintf("%s has not come back within %v: another process is stuck or gone, or the library is at fault", p.engine.inside(), grace))
	}
	why := p.unclean.Load()
	if why == nil || p.failed.Load() {
		return nil
	}
	return &UnendedError{Rank: p.engine.rank, Why: *why}
}

// pieceBytes is the longest piece of a stream's message.
const pieceBytes = 256 << 10

// stream is bytes in both directions between this process and another: pieces
// with their length in front, an empty one at the end.
type stream struct {
	p    *Process
	peer int
	in   *io.PipeReader
	// lost is closed when the other end takes nothing any more: nobody waits for it.
	lost   chan struct{}
	giveUp sync.Once

	mu     sync.Mutex
	out    []byte
	closed bool
}

// Stream returns the stream to another rank's process, of which a pair of
// processes has one.
func (p *Process) Stream(peer int) (io.ReadWriteCloser, error) {
	out, err := offHeap(pieceBytes + 4)
	if err != nil {
		return nil, err
	}
	into, err := offHeap(pieceBytes + 4)
	if err != nil {
		return nil, err
	}
	r, w := io.Pipe()
	s := &stream{p: p, peer: peer, in: r, out: out, lost: make(chan struct{})}
	p.streams.Go(func() {
		for {
			// The receiver can't know a piece's length: it takes the longest.
			if err := p.engine.do([]transfer{{peer: peer, tag: tagStream, mem: into}}); err != nil {
				_ = w.CloseWithError(err)
				return
			}
			n := binary.LittleEndian.Uint32(into)
			if n == 0 || n > pieceBytes {
				_ = w.Close()
				return
			}
			_, _ = w.Write(into[4 : 4+n]) // where the reader has closed, the rest is taken all the same
		}
	})
	return s, nil
}

func (s *stream) Read(b []byte) (int, error) { return s.in.Read(b) }

func (s *stream) Write(b []byte) (n int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return 0, io.ErrClosedPipe
	}
	for n < len(b) {
		piece := b[n:min(len(b), n+pieceBytes)]
		if err := s.send(piece); err != nil {
			return n, err
		}
		n += len(piece)
	}
	return n, nil
}

func (s *stream) send(piece []byte) error {
	binary.LittleEndian.PutUint32(s.out, uint32(len(piece)))
	copy(s.out[4:], piece)
	x := s.p.engine.begin([]transfer{{send: true, peer: s.peer, tag: tagStream, mem: s.out[:4+len(piece)]}}, false)
	select {
	case err := <-x.done:
		return err
	case <-s.p.engine.closed:
		return errEnded
	case <-s.lost:
		s.closed = true // out is MPI's from here on
		return io.ErrClosedPipe
	}
}

// Close tells the other end that nothing comes any more. It does not wait for a
// peer that takes nothing.
func (s *stream) Close() error {
	_ = s.in.Close()
	done := make(chan struct{})
	go func() {
		defer crash.Guard()
		defer close(done)
		s.mu.Lock()
		defer s.mu.Unlock()
		if !s.closed {
			s.closed = true
			_ = s.send(nil)
		}
	}()
	select {
	case <-done:
	case <-time.After(s.p.grace()):
		s.p.leave(fmt.Sprintf("the process of rank %d has not taken the end of its stream in time", s.peer))
		s.giveUp.Do(func() { close(s.lost) })
	}
	return nil
}
