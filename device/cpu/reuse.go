package cpu

import (
	"os"
	"sync"
)

// reused keeps the mappings of closed contexts with Options.Poison, by length: tests open
// thousands of small arenas, and to touch new pages takes most of the time for that on a virtual
// machine. An arena lies at the end of its mapping, before the unreadable page.
var reused = struct {
	sync.Mutex
	free map[int64][]mapping
}{free: map[int64][]mapping{}}

// Reused arenas have at most mostReused bytes; lengths are multiples of reuseStep.
const (
	mostReused = 4 << 20
	reuseStep  = 256 << 10
)

// reuse maps an arena, or takes a mapping that is free. Its bytes are arbitrary.
func reuse(bytes int64) (mapping, func() error, error) {
	if bytes > mostReused {
		m, err := mapMemory(bytes)
		return m, m.unmap, err
	}
	length := (bytes + reuseStep - 1) / reuseStep * reuseStep
	reused.Lock()
	defer reused.Unlock()
	var m mapping
	if list := reused.free[length]; len(list) > 0 {
		m, reused.free[length] = list[len(list)-1], list[:len(list)-1]
	} else {
		var err error
		if m, err = mapMemory(length); err != nil {
			return m, nil, err
		}
	}
	giveBack := func() error {
		reused.Lock()
		defer reused.Unlock()
		reused.free[length] = append(reused.free[length], m)
		return nil
	}
	page := int64(os.Getpagesize())
	start := length - (bytes+page-1)/page*page
	part := m
	part.data, part.size = m.data[start:][:bytes:bytes], bytes
	return part, giveBack, nil
}
