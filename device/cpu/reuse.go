package cpu

import (
	"bytes"
	"errors"
	"os"
	"sync"
)

// free keeps the mappings of closed contexts with Options.Poison, by length: tests open
// thousands of small arenas, and on a virtual machine the first touch of their pages takes most
// of the time for that. A free mapping is all poison.
var free = struct {
	sync.Mutex
	of map[int64][]mapping
}{of: map[int64][]mapping{}}

// Arenas of at most mostReused bytes are reused, in mappings whose lengths are multiples of
// reuseStep.
const (
	mostReused = 4 << 20
	reuseStep  = 256 << 10
)

// reuse maps a poisoned arena of at most mostReused bytes at the end of a mapping, before the
// unreadable page. A write before the arena is an error of unmap, and a write after unmap one of
// the next reuse, for which the mapping is gone.
func reuse(size int64) (m mapping, unmap func() error, err error) {
	length := (size + reuseStep - 1) / reuseStep * reuseStep
	free.Lock()
	list := free.of[length]
	if n := len(list); n > 0 {
		m, free.of[length] = list[n-1], list[:n-1]
	}
	free.Unlock()
	switch {
	case m.data == nil:
		if m, err = mapMemory(length); err != nil {
			return m, nil, err
		}
		poison(m.data)
	case !poisoned(m.data):
		return m, nil, errors.New("memory of a closed context was written")
	}
	whole, page := m, int64(os.Getpagesize())
	start := length - (size+page-1)/page*page
	m.data, m.size = whole.data[start:][:size:size], size
	return m, func() error {
		if !poisoned(whole.data[:start]) {
			return errors.New("memory before the arena was written")
		}
		poison(whole.data[start:])
		free.Lock()
		defer free.Unlock()
		free.of[length] = append(free.of[length], whole)
		return nil
	}, nil
}

// poisoned says whether all bytes are poison.
func poisoned(b []byte) bool {
	return len(b) == 0 || b[0] == poisonByte && bytes.Equal(b[1:], b[:len(b)-1])
}
