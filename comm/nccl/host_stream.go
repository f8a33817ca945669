package nccl

import (
	"io"
	"sync"
)

// mostQueued is the largest number of bytes that a stream buffers before Write blocks.
const mostQueued = 1 << 20

// hostStream is a bidirectional byte stream between two processes.
type hostStream struct {
	h      *Host
	gen    int        // generation of the host's ranks
	room   *sync.Cond // signals space in out; uses h.mu
	out    []byte     // bytes to send; guarded by h.mu
	closed bool       // no more bytes will be written

	mu    sync.Mutex
	ready *sync.Cond
	in    []byte
	ended bool
}

// newStream creates the stream to a peer; the caller holds h.mu.
func (h *Host) newStream(peer int) *hostStream {
	s := &hostStream{h: h, gen: h.gen, ended: h.over}
	s.room, s.ready = sync.NewCond(&h.mu), sync.NewCond(&s.mu)
	h.streams[peer] = s
	return s
}

// Stream returns the stream to another rank's process: rank 0 has one to each, the others
// one to rank 0.
func (h *Host) Stream(peer int) io.ReadWriteCloser {
	h.mu.Lock()
	defer h.mu.Unlock()
	if s := h.streams[peer]; s != nil {
		return s
	}
	return h.newStream(peer)
}

// over tells whether written bytes can no longer be delivered; the caller holds h.mu.
func (s *hostStream) over() bool { return s.h.over || s.gen != s.h.gen }

// come receives bytes from the peer; end says that they are the last.
func (s *hostStream) come(b []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.in = append(s.in, b...)
	s.ready.Broadcast()
}

func (s *hostStream) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	s.ready.Broadcast()
}

func (s *hostStream) Read(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.in) == 0 && !s.ended {
		s.ready.Wait()
	}
	if len(s.in) == 0 {
		return 0, io.EOF
	}
	n := copy(b, s.in)
	s.in = s.in[n:]
	return n, nil
}

func (s *hostStream) Write(b []byte) (n int, err error) {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	for n < len(b) {
		for len(s.out) >= mostQueued && !s.closed && !s.over() {
			s.room.Wait()
		}
		if s.closed || s.over() {
			return n, io.ErrClosedPipe
		}
		piece := b[n:min(len(b), n+mostQueued)]
		s.out = append(s.out, piece...)
		n += len(piece)
	}
	s.h.rouse()
	return n, nil
}

// Close tells the other end that no more bytes follow.
func (s *hostStream) Close() error {
	s.h.mu.Lock()
	s.closed = true
	s.room.Broadcast()
	s.h.mu.Unlock()
	s.h.rouse()
	s.end()
	return nil
}
