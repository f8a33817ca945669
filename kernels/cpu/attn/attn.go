package attn

import (
	"fmt"
	"math"
	"sync/atomic"

	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// Float is the element type of a kernel: float32 to train, float64 to check
// gradients.
type Float = num.Float

// Forward is one attention, forward. Set the exported fields, then call Run;
// a value may be run again with other fields, but not by two goroutines at
// once. A stride of 0 means rows without gaps.
type Forward[T Float] struct {
	Shape
	Scale T   // factor of the scores; 0 means 1/√D
	Cap   T   // soft cap of the scaled scores (num.SoftCap); 0: none
	Q     []T // (B·Tq, H·D)
	K, V  []T // (B·Tk, KV·D)
	Y     []T // (B·Tq, H·D), written; may share a buffer with no operand that is read
	Lse   []T // (B, H, Tq), log-sum-exp of the scaled scores, written; nil if not wanted
	// Starts (B·Tq) has for each position the first position of its document; a query sees no
	// earlier key. Values ascend within a sequence. nil: each sequence is one document.
	Starts []T
	Work   []T // ForwardWorkspace(Shape) elements, contents before and after are of no meaning

	// As is the type of 16-bit operands, which are given as Q16 … instead of Q …; T is then
	// float32.
	As                 vec.Half
	Q16, K16, V16, Y16 []uint16

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
	Scale  T   // as the forward's
	Cap    T   // as the forward's
	Q      []T // (B·Tq, H·D)
	K, V   []T // (B·Tk, KV·D)
	Y, Dy  []T // (B·Tq, H·D): the forward's output, and the loss's derivative by it
	Lse    []T // (B, H, Tq): the forward's
	Starts []T // the forward's
	Dq     []T // (B·Tq, H·D), written
	Dk     []T // (B·Tk, KV·D), written
	Dv     []T // (B·Tk, KV·D), written
	Work   []T // BackwardWorkspace(Shape) elements; of 16-bit operands BackwardWorkspace16

	// As and the 16-bit operands are as Forward's. Sums are float32 and rounded
	// once.
	As                                         vec.Half
	Q16, K16, V16, Y16, Dy16, Dq16, Dk16, Dv16 []uint16

	LdQ, LdK, LdV, LdY, LdDy, LdDq, LdDk, LdDv int // row strides in elements

	q, k, v, y, dy, dq, dk, dv rows[T]
	scale                      T
	next                       atomic.Int64 // task
	level                      level.Level
}

// rows is an operand: head h of row t of sequence b.
type rows[T Float] struct {
	data   []T
	half   []uint16 // in place of data
	as     vec.Half
	ld     int
	perSeq int
	one    bool // of one sequence and head alone
}

func (r *rows[T]) at(b, t, h, d int) int {
	if r.one {
		return t * r.ld
	}
	return (b*r.perSeq+t)*r.ld + h*d
}

// row returns a row of elements of type T.
func (r *rows[T]) row(b, t, h, d int) []T {
	at := r.at(b, t, h, d)
	return r.data[at : at+d : at+d]
}

// row16 is a row of 16-bit elements.
func (r *rows[T]) row16(b, t, h, d int) []uint16 {
	at := r.at(b, t, h, d)
	return r.half[at : at+d : at+d]
}

// read returns a row. A 16-bit row is converted into to.
func (r *rows[T]) read(b, t, h, d int, to []T) []T {
	if r.half == nil {
		return r.row(b, t, h, d)
	}
	wide, _ := any(to[:d]).([]float32)
	vec.WidenRow(r.as, wide, r.row16(b, t, h, d))
	return to[:d]
}

// write returns the memory in which to compute a row: the row itself or, for 16-bit operands,
// to. stored then converts to into the row.
func (r *rows[T]) write(b, t, h, d int, to []T) []T {
	if r.half == nil {
		return r.row(b, t, h, d)
	}
	return to[:d]
}

func (r *rows[T]) stored(b, t, h, d int, v []T) {
	if r.half != nil {
		wide, _ := any(v).([]float32)
		vec.NarrowRow(r.as, r.row16(b, t, h, d), wide)
	}
}

func (r *rows[T]) len() int { return max(len(r.data), len(r.half)) }

func roundUp(n, to int) int { return (n + to - 1) / to * to }

// offset is the position of query 0.
func (s *Shape) offset() int {
	if s.Causal {
		return s.Tk - s.Tq
	}
	return 0
}

// lead is the number of rows before query 0 in its tile. Tiles of queries begin at multiples of
// KeyTile, so that each has one tile of keys on the diagonal.
func (s *Shape) lead() int { return s.offset() % KeyTile }

// span is at least lead+Tq, and the same for every Tk above Tq, so that the
// workspace of a decoding step does not depend on how full its cache is.
func (s *Shape) span() int {
	if s.Causal && s.Tk > s.Tq {
		return s.Tq + KeyTile - 1
	}
	return s.Tq
}

// queryBlock is the number of positions that a task processes at a time: enough queries to
// amortize packing the keys and values again for each block, and few enough to stay in the L2
// cache.
func (s *Shape) queryBlock() int { return min(512, roundUp(s.span(), KeyTile)) }

// queryBlocks returns the number of blocks of n positions.
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

// backwardSlot16 is backwardSlot with the float32 sums of a key/value head's dk
// and dv, which rest there over blocks of queries and heads of a group.
func (s *Shape) backwardSlot16() int { return s.backwardSlot() + 2*s.Tk*s.D }

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

// BackwardWorkspace16 is BackwardWorkspace for 16-bit operands.
func BackwardWorkspace16(s Shape) int {
	if s.Validate() != nil {
		return 0
	}
	return min(s.backwardTasks(), maxSlots) * s.backwardSlot16()
}

// levelNow is level.Current. Tests that compare SIMD levels replace it.
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

// rowsOf is an operand: 16-bit where as says so.
func rowsOf[T Float](data []T, half []uint16, as vec.Half, ld, perSeq int) rows[T] {
	if as == vec.NoHalf {
		half = nil
	} else {
		data = nil
		if half == nil {
			half = []uint16{} // too short for any operand, but no T
		}
	}
	return rows[T]{data: data, half: half, as: as, ld: ld, perSeq: perSeq}
}

// checkHalf refuses 16-bit operands where T is not float32.
func checkHalf[T Float](op string, as vec.Half) error {
	var z T
	if _, ok := any(z).(float32); as != vec.NoHalf && !ok {
		return fmt.Errorf("%s: 16-bit operands with elements of %T, must be float32", op, z)
	}
	return nil
}

func (f *Forward[T]) check() error {
	const op = "attention"
	if err := f.Shape.Validate(); err != nil {
		return err
	}
	perSeq := or(f.KVRows, f.Tk)
	f.q = rowsOf(f.Q, f.Q16, f.As, or(f.LdQ, f.H*f.D), f.Tq)
	f.k = rowsOf(f.K, f.K16, f.As, or(f.LdK, f.KV*f.D), perSeq)
	f.v = rowsOf(f.V, f.V16, f.As, or(f.LdV, f.KV*f.D), perSeq)
	f.y = rowsOf(f.Y, f.Y16, f.As, or(f.LdY, f.H*f.D), f.Tq)
	if err := checkHalf[T](op, f.As); err != nil {
		return err
	}
	for _, o := range [...]operand{
		{"q", f.q.len(), f.q.ld, f.Tq, f.Tq, f.H * f.D, f.B, "LdQ", "Tq"},
		{"k", f.k.len(), f.k.ld, f.Tk, perSeq, f.KV * f.D, f.B, "LdK", "KVRows"},
		{"v", f.v.len(), f.v.ld, f.Tk, perSeq, f.KV * f.D, f.B, "LdV", "KVRows"},
		{"y", f.y.len(), f.y.ld, f.Tq, f.Tq, f.H * f.D, f.B, "LdY", "Tq"},
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
	if err := checkStarts(op, &f.Shape, f.Starts); err != nil {
		return err
	}
	var err error
	if f.scale, err = scaleOf(op, f.Scale, f.D); err != nil {
		return err
	}
	if !(f.Cap >= 0) || math.IsInf(float64(f.Cap), 1) {
		return fmt.Errorf("%s: Cap is %v, must be finite and not negative", op, f.Cap)
	}
	return checkFlat(op, "the workspace", len(f.Work), ForwardWorkspace(f.Shape))
}

func (f *Backward[T]) check() error {
	const op = "attention backward"
	if err := f.Shape.Validate(); err != nil {
		return err
	}
	wq, wk := f.H*f.D, f.KV*f.D
	f.q = rowsOf(f.Q, f.Q16, f.As, or(f.LdQ, wq), f.Tq)
	f.k = rowsOf(f.K, f.K16, f.As, or(f.LdK, wk), f.Tk)
	f.v = rowsOf(f.V, f.V16, f.As, or(f.LdV, wk), f.Tk)
	f.y = rowsOf(f.Y, f.Y16, f.As, or(f.LdY, wq), f.Tq)
	f.dy = rowsOf(f.Dy, f.Dy16, f.As, or(f.LdDy, wq), f.Tq)
	f.dq = rowsOf(f.Dq, f.Dq16, f.As, or(f.LdDq, wq), f.Tq)
	f.dk = rowsOf(f.Dk, f.Dk16, f.As, or(f.LdDk, wk), f.Tk)
	f.dv = rowsOf(f.Dv, f.Dv16, f.As, or(f.LdDv, wk), f.Tk)
	if err := checkHalf[T](op, f.As); err != nil {
		return err
	}
	for _, o := range [...]operand{
		{"q", f.q.len(), f.q.ld, f.Tq, f.Tq, wq, f.B, "LdQ", "Tq"},
		{"k", f.k.len(), f.k.ld, f.Tk, f.Tk, wk, f.B, "LdK", "Tk"},
		{"v", f.v.len(), f.v.ld, f.Tk, f.Tk, wk, f.B, "LdV", "Tk"},
		{"y", f.y.len(), f.y.ld, f.Tq, f.Tq, wq, f.B, "LdY", "Tq"},
		{"dy", f.dy.len(), f.dy.ld, f.Tq, f.Tq, wq, f.B, "LdDy", "Tq"},
		{"dq", f.dq.len(), f.dq.ld, f.Tq, f.Tq, wq, f.B, "LdDq", "Tq"},
		{"dk", f.dk.len(), f.dk.ld, f.Tk, f.Tk, wk, f.B, "LdDk", "Tk"},
		{"dv", f.dv.len(), f.dv.ld, f.Tk, f.Tk, wk, f.B, "LdDv", "Tk"},
	} {
		if err := o.check(op); err != nil {
			return err
		}
	}
	if err := checkFlat(op, "lse", len(f.Lse), f.B*f.H*f.Tq); err != nil {
		return err
	}
	if err := checkStarts(op, &f.Shape, f.Starts); err != nil {
		return err
	}
	var err error
	if f.scale, err = scaleOf(op, f.Scale, f.D); err != nil {
		return err
	}
	if !(f.Cap >= 0) || math.IsInf(float64(f.Cap), 1) {
		return fmt.Errorf("%s: Cap is %v, must be finite and not negative", op, f.Cap)
	}
	work := BackwardWorkspace(f.Shape)
	if f.As != vec.NoHalf {
		work = BackwardWorkspace16(f.Shape)
	}
	return checkFlat(op, "the workspace", len(f.Work), work)
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
	f.prepare()
	p.Run(min(f.tasks, maxSlots), f)
	return nil
}

func (f *Forward[T]) prepare() {
	f.level = levelNow()
	f.next.Store(0)
	f.tasks = f.forwardTasks(f.lead() + f.Tq)
}

// RunIndex does tasks, as long as there are any, with a slot's scratch; for the
// pool. So a goroutine stays with scratch that is in its caches, and late slots
// find nothing to do. A task is a block of queries of a head; the longest first.
func (f *Forward[T]) RunIndex(slot int) {
	n := f.forwardSlot()
	for task := int(f.next.Add(1)) - 1; task < f.tasks; task = int(f.next.Add(1)) - 1 {
		f.do(task, f.Work[slot*n:(slot+1)*n])
	}
}

// do does a task.
func (f *Forward[T]) do(task int, scratch []T) {
	heads := f.B * f.H
	head, block := task%heads, f.tasks/heads-1-task/heads
	b, h := head/f.H, head%f.H
	from := max(block*f.queryBlock()-f.lead(), 0)
	to := min((block+1)*f.queryBlock()-f.lead(), f.Tq)
	if simdForward(f, b, h, from, to, scratch) {
		return
	}
	for t := from; t < to; t++ {
		f.forwardRow(b, h, t, scratch)
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
	if f.As != vec.NoHalf {
		n = f.backwardSlot16()
	}
	scratch := f.Work[slot*n : (slot+1)*n]
	group := f.H / f.KV
	for task := int(f.next.Add(1)) - 1; task < f.backwardTasks(); task = int(f.next.Add(1)) - 1 {
		b, g := task/f.KV, task%f.KV
		for h := g * group; h < (g+1)*group; h++ {
			if !simdBackward(f, b, h, scratch) {
				f.backwardHead(b, h, scratch)
			}
		}
	}
}

// sums are the float32 sums of dk and dv of 16-bit operands, in a slot's scratch;
// else the outputs themselves.
func (f *Backward[T]) sums(scratch []T) (dk, dv rows[T]) {
	if f.As == vec.NoHalf {
		return f.dk, f.dv
	}
	rest, n := scratch[f.backwardSlot():], f.Tk*f.D
	return rows[T]{data: rest[:n], ld: f.D, one: true}, rows[T]{data: rest[n : 2*n], ld: f.D, one: true}
}

// settle rounds the float32 sums of a key/value head and stores them in the 16-bit outputs.
func (f *Backward[T]) settle(b, g int, dk, dv *rows[T]) {
	if f.As == vec.NoHalf {
		return
	}
	for j := range f.Tk {
		f.dk.stored(b, j, g, f.D, dk.row(b, j, g, f.D))
		f.dv.stored(b, j, g, f.D, dv.row(b, j, g, f.D))
	}
}
