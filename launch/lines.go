package launch

import (
	"bytes"
	"io"
	"sync"
)

// merger merges the output of several ranks into one writer, line by line.
type merger struct {
	mu sync.Mutex
	to io.Writer
}

func newMerger(to io.Writer) *merger { return &merger{to: to} }

// Write writes b unchanged.
func (m *merger) Write(b []byte) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.to.Write(b)
}

// lines is a writer that adds a rank's name before each of its lines.
type lines struct {
	m    *merger
	name func() string
	mu   sync.Mutex
	part []byte // the start of a line that has not ended
}

// longestLine is the length in bytes at which a line without an end is broken.
const longestLine = 1 << 16

// rank returns the writer for a process; name returns the prefix of its lines.
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

// flush writes the last line, if it has no newline.
func (l *lines) flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.part) > 0 {
		_ = l.line(l.part)
		l.part = nil
	}
}
