package memplan

import "fmt"

// Options of Assign.
type Options struct {
	// Align is the alignment of every root buffer's offset in bytes, a power of two. 0: 256, which
	// suits every vector width and CUDA's own allocations.
	Align int64
	// Stop, if not nil, is called before the buffers of each space are placed, and then for every
	// stopEvery buffers. Assign ends with its error.
	Stop func() error
	// Known, if not nil, is shared with other calls, which may have placed the same buffers.
	Known *Known
}

// DefaultAlign is the alignment of buffers if Options.Align is 0.
const DefaultAlign = 256

func (o Options) align() (int64, error) {
	a := o.Align
	if a == 0 {
		a = DefaultAlign
	}
	if a < 0 || a&(a-1) != 0 {
		return 0, fmt.Errorf("memplan.Assign: alignment %d is not a power of two", o.Align)
	}
	return a, nil
}
