package launch

import (
	"bytes"
	"io"
	"sync"
)

// merger writes what several ranks say to one place, whole lines at a time.
type merger struct {
	mu sync.Mutex
	to io.Writer
}

func newMerger(to io.Writer) *merger { return &merger{to: to} }

// Write passes on as it is.
func (m *merger) Write(b []byte) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.to.Write(b)
}

// lines puts a rank in front of each of its lines.
type lines struct {
	m    *merger
	name func() string
	mu   sync.Mutex
	part []byte // of a line that has not ended
}

// longestLine is where a line without an end is broken.
const longestLine = 1 << 16

// rank is where a process writes that is called by name.
func (m *merger) rank(name func() string) *lines { return &lines{m: m, name: name} }

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.part = append(l.part, b...)
	for {
		i := bytes.IndexByte(l.part, '\n')
		if i < 0 && len(l.part) < longestLine {
			return len(b), nil
		}
		if i < 0 {
			i = len(l.part) - 1
		}
		if err := l.line(bytes.TrimSuffix(l.part[:i+1], []byte("\n"))); err != nil {
			return len(b), err
		}
		l.part = l.part[i+1:]
	}
}

func (l *lines) line(text []byte) error {
	_, err := l.m.Write([]byte("[" + l.name() + "] " + string(text) + "\n"))
	return err
}

// flush writes what is left of a last line.
func (l *lines) flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.part) > 0 {
		_ = l.line(l.part)
		l.part = nil
	}
}
