package training

import (
	"log"
	"net"
	"strings"
	"sync"
	"time"
)

// Limits for the readers of --metrics-addr.
const (
	observerConns   = 16
	observersServed = 4 // concurrent requests
	observerTimeout = 5 * time.Second
	// savesFiles is the number of file descriptors reserved for saves.
	savesFiles = 32
)

// observers accepts at most observerConns connections at once. Others wait in the kernel's queue,
// which costs the run nothing.
type observers struct {
	net.Listener
	slots  chan struct{}
	closed chan struct{}
	once   sync.Once
	log    *log.Logger
}

// Accept waits for a slot and a connection. It closes a connection that would leave fewer than
// savesFiles file descriptors.
func (o *observers) Accept() (net.Conn, error) {
	select {
	case o.slots <- struct{}{}:
	case <-o.closed:
		return nil, net.ErrClosed
	}
	for {
		c, err := o.Listener.Accept()
		if err != nil {
			<-o.slots
			return nil, err
		}
		if filesLeft(c) >= savesFiles {
			return &observer{Conn: c, leave: sync.OnceFunc(func() { <-o.slots })}, nil
		}
		_ = c.Close()
		o.log.Printf("connections are refused while fewer than %d file descriptors are left, which stay for saves; raise ulimit -n", savesFiles)
	}
}

// Close ends Accept.
func (o *observers) Close() error {
	o.once.Do(func() { close(o.closed) })
	return o.Listener.Close()
}

// observer is a connection that holds a slot.
type observer struct {
	net.Conn
	leave func()
}

func (o *observer) Close() error {
	defer o.leave()
	return o.Conn.Close()
}

// observerLog turns the server's log into warnings of the run, at most one a minute.
type observerLog struct {
	warn func(string)
	mu   sync.Mutex
	last time.Time
}

func (l *observerLog) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.warn != nil && (l.last.IsZero() || time.Since(l.last) >= time.Minute) {
		l.last = time.Now()
		l.warn("--metrics-addr: " + strings.TrimSpace(string(b)))
	}
	return len(b), nil
}
