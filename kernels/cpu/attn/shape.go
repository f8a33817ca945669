package attn

import (
	"errors"
	"fmt"
	"math"
)

// KeyTile is the number of keys between two updates of a row's running
// maximum. It is part of the definition of the numbers.
const KeyTile = 64

// maxSlots bounds the workspace and the tasks of a call that run at once: a
// call has min(tasks, maxSlots) slots of scratch.
const maxSlots = 32

// Shape is the sizes of an attention, the same for its forward and backward.
type Shape struct {
	B      int  // sequences
	Tq     int  // queries a sequence: its last Tq positions
	Tk     int  // keys and values a sequence
	H      int  // query heads
	KV     int  // key/value heads; divides H
	D      int  // channels a head
	Causal bool // a query sees no key behind its own position
	Window int  // a causal query sees this many keys, the one at its position the last; 0: all before
}

// Validate says what is wrong with the sizes, naming the dimension.
func (s Shape) Validate() error {
	switch {
	case s.B < 0:
		return fmt.Errorf("attention: B is %d sequences, must be 0 or more", s.B)
	case s.Tq < 0:
		return fmt.Errorf("attention: Tq is %d queries, must be 0 or more", s.Tq)
	case s.Tk < 0:
		return fmt.Errorf("attention: Tk is %d keys, must be 0 or more", s.Tk)
	case s.H < 1:
		return fmt.Errorf("attention: H is %d heads, must be 1 or more", s.H)
	case s.KV < 1 || s.H%s.KV != 0:
		return fmt.Errorf("attention: KV is %d key/value heads, must divide the H = %d query heads", s.KV, s.H)
	case s.D < 1:
		return fmt.Errorf("attention: D is %d channels a head, must be 1 or more", s.D)
	case s.Tq > 0 && s.Tk == 0:
		return fmt.Errorf("attention: Tq is %d queries over Tk = 0 keys, a query needs a key", s.Tq)
	case s.Causal && s.Tq > s.Tk:
		return fmt.Errorf("attention: Tq is %d causal queries over Tk = %d keys, must be Tk at most", s.Tq, s.Tk)
	}
	if s.Window < 0 || s.Window > 0 && !s.Causal {
		return fmt.Errorf("attention: Window is %d keys, must be 0, or more with Causal", s.Window)
	}
	// Every element count and workspace below stays far from overflow.
	const most = math.MaxInt / 4096
	n := 1
	for _, d := range []struct {
		name string
		n    int
	}{{"B", s.B}, {"max(Tq, Tk)", max(s.Tq, s.Tk)}, {"H", s.H}, {"D", s.D + 16}} {
		if d.n > 0 && n > most/d.n {
			return fmt.Errorf("attention: %s of %d makes more elements than can be addressed", d.name, d.n)
		}
		n *= max(d.n, 1)
	}
	return nil
}

// visible is the number of keys that query t sees.
func (s *Shape) visible(t int) int {
	if s.Causal {
		return t + s.Tk - s.Tq + 1
	}
	return s.Tk
}

// view gives the first visible key of each query of a sequence, which depends on the window and
// on the documents' starts.
type view[T Float] struct {
	*Shape
	starts []T // by position; empty: all 0
}

// viewOf returns the view of sequence b.
func viewOf[T Float](s *Shape, starts []T, b int) view[T] {
	if len(starts) == 0 {
		return view[T]{Shape: s}
	}
	return view[T]{s, starts[b*s.Tk : (b+1)*s.Tk]}
}

// begin returns the first key of the first key tile for the query tile that starts at position
// base: the tile of the first key that the query at base sees.
func (v *view[T]) begin(base int) int { return v.from(base) / KeyTile * KeyTile }

// beginOf is begin for the tile of query t.
func (v *view[T]) beginOf(t int) int { return v.begin((t + v.offset()) / KeyTile * KeyTile) }

// first returns the first key that query t sees.
func (v *view[T]) first(t int) int { return v.from(t + v.offset()) }

// from returns the first key that the query at a position sees.
func (v *view[T]) from(position int) int {
	first := 0
	if v.Window > 0 {
		first = max(position+1-v.Window, 0)
	}
	if position < len(v.starts) && v.starts[position] > 0 {
		first = max(first, min(int(v.starts[position]), position))
	}
	return first
}

// checkStarts returns an error unless starts is empty, or the attention is causal with a start
// for each position.
func checkStarts[T Float](op string, s *Shape, starts []T) error {
	switch {
	case len(starts) == 0:
		return nil
	case !s.Causal || s.Tq != s.Tk:
		return fmt.Errorf("%s: Starts of %d queries over Tk = %d keys, Causal %v; they are for causal queries at all positions", op, s.Tq, s.Tk, s.Causal)
	}
	return checkFlat(op, "Starts", len(starts), s.B*s.Tk)
}

// operand is the extent of rows × width elements at a row stride, over B
// sequences whose first rows are rowsPerSeq apart.
type operand struct {
	name         string
	len          int // elements that the slice has
	stride       int // elements from a row to the next
	rows         int // rows of a sequence
	rowsPerSeq   int // rows from a sequence's first to the next's
	width        int // elements of a row
	sequences    int
	strideName   string
	sequenceName string
}

func (o operand) check(op string) error {
	if o.sequences == 0 || o.rows == 0 {
		return nil
	}
	if o.stride < o.width {
		return fmt.Errorf("%s: %s is %d, must be at least the %d elements of a row of %s", op, o.strideName, o.stride, o.width, o.name)
	}
	if o.rowsPerSeq < o.rows {
		return fmt.Errorf("%s: %s is %d rows, must be at least the %d rows of a sequence of %s", op, o.sequenceName, o.rowsPerSeq, o.rows, o.name)
	}
	// (sequences-1)·rowsPerSeq + rows-1 rows of stride, then one of width.
	if o.sequences > 1 && o.rowsPerSeq > (math.MaxInt/4-o.rows)/(o.sequences-1) {
		return fmt.Errorf("%s: %s of %d rows reaches beyond what can be addressed", op, o.sequenceName, o.rowsPerSeq)
	}
	last := (o.sequences-1)*o.rowsPerSeq + o.rows - 1
	if last > 0 && o.stride > (math.MaxInt/4-o.width)/last {
		return fmt.Errorf("%s: %s of %d reaches beyond what can be addressed", op, o.strideName, o.stride)
	}
	if need := last*o.stride + o.width; o.len < need {
		return fmt.Errorf("%s: %s has %d elements, its %d sequences of %d rows by %d at stride %d need %d", op, o.name, o.len, o.sequences, o.rows, o.width, o.stride, need)
	}
	return nil
}

func checkFlat(op, name string, have, need int) error {
	if have < need {
		return fmt.Errorf("%s: %s has %d elements, must have %d", op, name, have, need)
	}
	return nil
}

var errNoPool = errors.New("attention: no worker pool given")
