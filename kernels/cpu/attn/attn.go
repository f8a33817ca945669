package attn

import (
	"fmt"
	"math"
	"sync/atomic"

	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// Float is the element type of a kernel: float32 to train, float64 to check
// gradients.
type Float = num.Float

// Forward is one attention, forward. Set the exported fields, then call Run;
// a value may be run again with other fields, but not by two goroutines at
// once. A stride of 0 means rows without gaps.
type Forward[T Float] struct {
	Shape
	Scale T   // of the scores; 0 means 1/√D
	Q     []T // (B·Tq, H·D)
	K, V  []T // (B·Tk, KV·D)
	Y     []T // (B·Tq, H·D), written; may share a buffer with no operand that is read
	Lse   []T // (B, H, Tq), log-sum-exp of the scaled scores, written; nil if not wanted
	Work  []T // ForwardWorkspace(Shape) elements, contents before and after are of no meaning

	LdQ, LdK, LdV, LdY int // row strides in elements
	// KVRows is the number of rows from a sequence's first key to the next
	// sequence's, the capacity of a key/value cache. 0 means Tk.
	KVRows int

	q, k, v, y rows[T]
	scale      T
	tasks      int
	next       atomic.Int64 // task
	level      level.Level
}

// Backward is one attention, backward. See Forward for its use. dq, dk and dv
// are written, not accumulated into.
type Backward[T Float] struct {
	Shape
	Scale T   // as the forward's
	Q     []T // (B·Tq, H·D)
	K, V  []T // (B·Tk, KV·D)
	Y, Dy []T // (B·Tq, H·D): the forward's output, and the loss's derivative by it
	Lse   []T // (B, H, Tq): the forward's
	Dq    []T // (B·Tq, H·D), written
	Dk    []T // (B·Tk, KV·D), written
	Dv    []T // (B·Tk, KV·D), written
	Work  []T // BackwardWorkspace(Shape) elements

	LdQ, LdK, LdV, LdY, LdDy, LdDq, LdDk, LdDv int // row strides in elements

	q, k, v, y, dy, dq, dk, dv rows[T]
	scale                      T
	next                       atomic.Int64 // task
	level                      level.Level
}

// rows is an operand: head h of row t of sequence b.
type rows[T Float] struct {
	data   []T
	ld     int
	perSeq int
}

func (r *rows[T]) row(b, t, h, d int) []T {
	at := (b*r.perSeq+t)*r.ld + h*d
	return r.data[at : at+d : at+d]
}

func roundUp(n, to int) int { return (n + to - 1) / to * to }

// offset is the position of query 0.
func (s *Shape) offset() int {
	if s.Causal {
		return s.Tk - s.Tq
	}
	return 0
}

// lead is the rows before query 0 in its tile: tiles of queries begin at
// positions that are multiples of KeyTile, so that each meets one tile of keys
// on the diagonal.
func (s *Shape) lead() int { return s.offset() % KeyTile }

// span is at least lead+Tq, and the same for every Tk above Tq, so that the
// workspace of a decoding step does not depend on how full its cache is.
func (s *Shape) span() int {
	if s.Causal && s.Tk > s.Tq {
		return s.Tq + KeyTile - 1
	}
	return s.Tq
}

// queryBlock is the positions that a task works on at a time: enough queries to
// make up for packing the keys and values anew for each block, few enough to
// stay in the second cache.
func (s *Shape) queryBlock() int { return min(512, roundUp(s.span(), KeyTile)) }

// queryBlocks is the blocks of n positions.
func (s *Shape) queryBlocks(n int) int { return (n + s.queryBlock() - 1) / s.queryBlock() }

func (s *Shape) forwardTasks(positions int) int {
	if s.Tq == 0 {
		return 0
	}
	return s.B * s.H * s.queryBlocks(positions)
}

func (s *Shape) backwardTasks() int {
	if s.Tk == 0 {
		return 0
	}
	return s.B * s.KV
}

func (s *Shape) forwardSlot() int {
	d, b := roundUp(s.D, 16), s.queryBlock()
	// q and accumulators, lanes of l, m; kᵀ and v tiles; scores; α, c; alignment.
	return 2*b*d + 17*b + 2*KeyTile*d + KeyTile*KeyTile + 2*KeyTile + 16
}

func (s *Shape) backwardSlot() int {
	d, b := roundUp(s.D, 16), s.queryBlock()
	// q, dy, dq; delta; kᵀ, vᵀ, k, dk, dv tiles; p and ds; alignment.
	return 3*b*d + b + 5*KeyTile*d + 2*KeyTile*KeyTile + 16
}

// ForwardWorkspace is the elements of Forward.Work. It does not depend on the
// number of threads, nor on Tk where that is above Tq, and beyond 512 queries
// and some tasks it grows no more.
func ForwardWorkspace(s Shape) int {
	if s.Validate() != nil {
		return 0
	}
	return min(s.forwardTasks(s.span()), maxSlots) * s.forwardSlot()
}

// BackwardWorkspace is the elements of Backward.Work, as ForwardWorkspace.
func BackwardWorkspace(s Shape) int {
	if s.Validate() != nil {
		return 0
	}
	return min(s.backwardTasks(), maxSlots) * s.backwardSlot()
}

// levelNow is level.Current, but for tests that compare levels.
var levelNow = level.Current

func or(v, otherwise int) int {
	if v == 0 {
		return otherwise
	}
	return v
}

func scaleOf[T Float](op string, scale T, d int) (T, error) {
	if scale == 0 {
		return T(1 / math.Sqrt(float64(d))), nil
	}
	if !(scale > 0) || math.IsInf(float64(scale), 1) {
		return 0, fmt.Errorf("%s: Scale is %v, must be positive and finite, or 0 for 1/√D", op, scale)
	}
	return scale, nil
}

func (f *Forward[T]) check() error {
	const op = "attention"
	if err := f.Shape.Validate(); err != nil {
		return err
	}
	perSeq := or(f.KVRows, f.Tk)
	f.q = rows[T]{f.Q, or(f.LdQ, f.H*f.D), f.Tq}
	f.k = rows[T]{f.K, or(f.LdK, f.KV*f.D), perSeq}
	f.v = rows[T]{f.V, or(f.LdV, f.KV*f.D), perSeq}
	f.y = rows[T]{f.Y, or(f.LdY, f.H*f.D), f.Tq}
	for _, o := range [...]operand{
		{"q", len(f.Q), f.q.ld, f.Tq, f.Tq, f.H * f.D, f.B, "LdQ", "Tq"},
		{"k", len(f.K), f.k.ld, f.Tk, perSeq, f.KV * f.D, f.B, "LdK", "KVRows"},
		{"v", len(f.V), f.v.ld, f.Tk, perSeq, f.KV * f.D, f.B, "LdV", "KVRows"},
		{"y", len(f.Y), f.y.ld, f.Tq, f.Tq, f.H * f.D, f.B, "LdY", "Tq"},
	} {
		if err := o.check(op); err != nil {
			return err
		}
	}
	if f.Lse != nil {
		if err := checkFlat(op, "lse", len(f.Lse), f.B*f.H*f.Tq); err != nil {
			return err
		}
	}
	var err error
	if f.scale, err = scaleOf(op, f.Scale, f.D); err != nil {
		return err
	}
	return checkFlat(op, "the workspace", len(f.Work), ForwardWorkspace(f.Shape))
}

func (f *Backward[T]) check() error {
	const op = "attention backward"
	if err := f.Shape.Validate(); err != nil {
		return err
	}
	wq, wk := f.H*f.D, f.KV*f.D
	f.q = rows[T]{f.Q, or(f.LdQ, wq), f.Tq}
	f.k = rows[T]{f.K, or(f.LdK, wk), f.Tk}
	f.v = rows[T]{f.V, or(f.LdV, wk), f.Tk}
	f.y = rows[T]{f.Y, or(f.LdY, wq), f.Tq}
	f.dy = rows[T]{f.Dy, or(f.LdDy, wq), f.Tq}
	f.dq = rows[T]{f.Dq, or(f.LdDq, wq), f.Tq}
	f.dk = rows[T]{f.Dk, or(f.LdDk, wk), f.Tk}
	f.dv = rows[T]{f.Dv, or(f.LdDv, wk), f.Tk}
	for _, o := range [...]operand{
		{"q", len(f.Q), f.q.ld, f.Tq, f.Tq, wq, f.B, "LdQ", "Tq"},
		{"k", len(f.K), f.k.ld, f.Tk, f.Tk, wk, f.B, "LdK", "Tk"},
		{"v", len(f.V), f.v.ld, f.Tk, f.Tk, wk, f.B, "LdV", "Tk"},
		{"y", len(f.Y), f.y.ld, f.Tq, f.Tq, wq, f.B, "LdY", "Tq"},
		{"dy", len(f.Dy), f.dy.ld, f.Tq, f.Tq, wq, f.B, "LdDy", "Tq"},
		{"dq", len(f.Dq), f.dq.ld, f.Tq, f.Tq, wq, f.B, "LdDq", "Tq"},
		{"dk", len(f.Dk), f.dk.ld, f.Tk, f.Tk, wk, f.B, "LdDk", "Tk"},
		{"dv", len(f.Dv), f.dv.ld, f.Tk, f.Tk, wk, f.B, "LdDv", "Tk"},
	} {
		if err := o.check(op); err != nil {
			return err
		}
	}
	if err := checkFlat(op, "lse", len(f.Lse), f.B*f.H*f.Tq); err != nil {
		return err
	}
	var err error
	if f.scale, err = scaleOf(op, f.Scale, f.D); err != nil {
		return err
	}
	return checkFlat(op, "the workspace", len(f.Work), BackwardWorkspace(f.Shape))
}

// Run computes Y and Lse on the pool. It allocates nothing. Sizes that do not
// fit are refused, naming operand and dimension, before anything is written.
func (f *Forward[T]) Run(p *pool.Pool) error {
	if p == nil {
		return errNoPool
	}
	if err := f.check(); err != nil {
		return err
	}
	f.level = levelNow()
	f.next.Store(0)
	f.tasks = f.forwardTasks(f.lead() + f.Tq)
	p.Run(min(f.tasks, maxSlots), f)
	return nil
}

// RunIndex does tasks, as long as there are any, with a slot's scratch; for the
// pool. So a goroutine stays with scratch that is in its caches, and late slots
// find nothing to do. A task is a block of queries of a head; the longest first.
func (f *Forward[T]) RunIndex(slot int) {
	n := f.forwardSlot()
	scratch := f.Work[slot*n : (slot+1)*n]
	heads := f.B * f.H
	for task := int(f.next.Add(1)) - 1; task < f.tasks; task = int(f.next.Add(1)) - 1 {
		head, block := task%heads, f.tasks/heads-1-task/heads
		b, h := head/f.H, head%f.H
		from := max(block*f.queryBlock()-f.lead(), 0)
		to := min((block+1)*f.queryBlock()-f.lead(), f.Tq)
		if simdForward(f, b, h, from, to, scratch) {
			continue
		}
		for t := from; t < to; t++ {
			f.forwardRow(b, h, t)
		}
	}
}

// Run computes Dq, Dk and Dv on the pool, as Forward.Run.
func (f *Backward[T]) Run(p *pool.Pool) error {
	if p == nil {
		return errNoPool
	}
	if err := f.check(); err != nil {
		return err
	}
	f.level = levelNow()
	f.next.Store(0)
	p.Run(min(f.backwardTasks(), maxSlots), f)
	return nil
}

// RunIndex does tasks with a slot's scratch; for the pool. A task is a
// key/value head: one goroutine does all that is added into its dk and dv.
func (f *Backward[T]) RunIndex(slot int) {
	n := f.backwardSlot()
	scratch := f.Work[slot*n : (slot+1)*n]
	group := f.H / f.KV
	for task := int(f.next.Add(1)) - 1; task < f.backwardTasks(); task = int(f.next.Add(1)) - 1 {
		b, g := task/f.KV, task%f.KV
		for h := g * group; h < (g+1)*group; h++ {
			if !simdBackward(f, b, h, scratch) {
				f.backwardHead(b, h)
			}
		}
	}
}
