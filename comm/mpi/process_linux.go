package mpi

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/world"
	"github.com/spillway-ml/spillway/internal/crash"
)

// Process is this process's MPI library and its engine.
type Process struct {
	engine  *engine
	unclean atomic.Pointer[string] // why MPI_Finalize must be skipped; nil: it need not
	failed  atomic.Bool            // the job has ended with an error
	streams sync.WaitGroup
}

const defaultTimeout = world.DefaultTimeout

// Start opens the file that the environment variable LibraryVar names or, if it is not set, the
// first installed library of the families in order, and initializes MPI. MPI's rank and size must
// be the launcher's rank and world. timeout is Options.Timeout; MPI_Init, which waits for all
// processes, may take initTimes that.
func Start(order []Family, rank, world int, timeout time.Duration) (*Process, error) {
	own, err := signalsBefore()
	if err = errors.Join(err, patience()); err != nil {
		return nil, err
	}
	l, err := open(order, os.Getenv(LibraryVar))
	if err != nil {
		return nil, err
	}
	e, err := startInTime(l, rank, world, initTimes*cmp.Or(max(timeout, 0), defaultTimeout))
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

// startInTime starts the engine. It returns an error if MPI_Init does not return within
// grace: MPI_Init waits for every process of the job, there are no heartbeats yet, and not
// every launcher reports a process that has ended or is stuck. After the error the process
// must exit.
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

// About describes the library in one line.
func (p *Process) About() string { return p.engine.lib.path + ": " + p.engine.lib.name }

// Time limits for each wait for other processes while a process ends. The limit is shorter
// after a failure, because a host may have become unreachable.
var (
	closeGrace  = 10 * time.Second // MPI_Finalize took over 3 s on a busy machine; tests reduce it
	failedGrace = 100 * time.Millisecond
)

func (p *Process) grace() time.Duration {
	if p.failed.Load() {
		return failedGrace
	}
	return closeGrace
}

// Failed tells whether the job has ended with an error.
func (p *Process) Failed() bool { return p.failed.Load() }

// leave makes Close skip MPI_Finalize, for the reason why.
func (p *Process) leave(why string) { p.unclean.CompareAndSwap(nil, &why) }

// Close finalizes MPI; every process of the job must call it. If messages are still pending,
// as after an error, Close does not finalize, and the process must exit; its launcher then ends
// the others. If the job has not failed, the error is an *UnendedError in that case.
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

// stream is a bidirectional byte stream to another process. It sends pieces, each preceded by
// its length; an empty piece marks the end.
type stream struct {
	p    *Process
	peer int
	in   *io.PipeReader
	// lost is closed when the other end no longer receives; writers then stop waiting.
	lost   chan struct{}
	giveUp sync.Once

	mu     sync.Mutex
	out    []byte
	closed bool
}

// Stream returns the stream to another rank's process. Each pair of processes has one
// stream.
func (p *Process) Stream(peer int) (io.ReadWriteCloser, error) {
	const size = pieceBytes + 4
	both, err := offHeap(2 * size)
	if err != nil {
		return nil, err
	}
	out, into := both[:size], both[size:]
	r, w := io.Pipe()
	s := &stream{p: p, peer: peer, in: r, out: out, lost: make(chan struct{})}
	p.streams.Go(func() {
		for {
			// The receiver does not know a piece's length in advance, so it posts the maximum.
			if err := p.engine.do([]transfer{{peer: peer, tag: tagStream, mem: into}}); err != nil {
				_ = w.CloseWithError(err)
				return
			}
			n := binary.LittleEndian.Uint32(into)
			if n == 0 || n > pieceBytes {
				_ = w.Close()
				return
			}
			_, _ = w.Write(into[4 : 4+n]) // if the reader has closed, keep receiving and drop the bytes
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
		s.closed = true // MPI may access out from here on
		return io.ErrClosedPipe
	}
}

// Close tells the other end that no more bytes follow. It does not wait for a peer that no
// longer receives.
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
