// Package interp runs a step program in the simplest way: operations in program order, one rank
// after another, on Go slices, with portable arithmetic that is generic over float32 and float64.
//
// In float32 it is the reference for the bits of the executor and of bound kernels. In float64 it
// computes the finite-difference checks of gradients. It ignores arenas, streams, events and
// workspace.
package interp

import (
	"fmt"
	"math"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// World is the memory of all ranks of a program. F32 buffers are []T; F64, I64, I32 and U8 buffers
// keep their types. BF16 and F16 operands are widened to []T for an operation and its results are
// rounded once, as a 16-bit kernel that computes in f32 must do. A root buffer is allocated at its
// first use. Floats are filled with NaN, so that reads of unwritten elements are seen.
type World[T num.Float] struct {
	prog  *graph.Program
	ranks []rank[T]
	pool  *pool.Pool
	kinds map[graph.Kind]func(*call[T])

	sent map[graph.PeerAttr][][]T // messages not yet received, the oldest first
}

type rank[T num.Float] struct {
	coord []int
	roots []storage[T] // by BufID
}

type storage[T num.Float] struct {
	t   []T
	f64 []float64
	i64 []int64
	i32 []int32
	u16 []uint16 // BF16 and F16, as bits
	u8  []uint8
}

// New returns the zero memory of every rank of p.
func New[T num.Float](p *graph.Program) *World[T] {
	w := &World[T]{prog: p, pool: pool.New(1), kinds: table[T](), sent: map[graph.PeerAttr][][]T{}}
	for r := range p.WorldSize() {
		coord := make([]int, len(p.Mesh))
		for a := len(p.Mesh) - 1; a >= 0; a-- {
			coord[a] = r % p.Mesh[a].Size
			r /= p.Mesh[a].Size
		}
		w.ranks = append(w.ranks, rank[T]{coord: coord, roots: make([]storage[T], len(p.Buffers))})
	}
	return w
}

// Floats returns an F32 buffer of a rank. A view shares its base's elements.
func (w *World[T]) Floats(rank int, id graph.BufID) ([]T, error) {
	s, lo, hi, err := w.at(rank, id, graph.F32)
	if err != nil {
		return nil, err
	}
	return s.t[lo:hi:hi], nil
}

// F64 returns an F64 buffer of a rank.
func (w *World[T]) F64(rank int, id graph.BufID) ([]float64, error) {
	s, lo, hi, err := w.at(rank, id, graph.F64)
	if err != nil {
		return nil, err
	}
	return s.f64[lo:hi:hi], nil
}

// I64 returns an I64 buffer of a rank.
func (w *World[T]) I64(rank int, id graph.BufID) ([]int64, error) {
	s, lo, hi, err := w.at(rank, id, graph.I64)
	if err != nil {
		return nil, err
	}
	return s.i64[lo:hi:hi], nil
}

// I32 returns an I32 buffer of a rank.
func (w *World[T]) I32(rank int, id graph.BufID) ([]int32, error) {
	s, lo, hi, err := w.at(rank, id, graph.I32)
	if err != nil {
		return nil, err
	}
	return s.i32[lo:hi:hi], nil
}

// U8 returns a U8 buffer of a rank.
func (w *World[T]) U8(rank int, id graph.BufID) ([]uint8, error) {
	s, lo, hi, err := w.at(rank, id, graph.U8)
	if err != nil {
		return nil, err
	}
	return s.u8[lo:hi:hi], nil
}

// U16 returns the bits of a BF16 or F16 buffer of a rank.
func (w *World[T]) U16(rank int, id graph.BufID) ([]uint16, error) {
	dt := graph.BF16
	if id >= 0 && int(id) < len(w.prog.Buffers) && w.prog.Buf(id).DType == graph.F16 {
		dt = graph.F16
	}
	s, lo, hi, err := w.at(rank, id, dt)
	if err != nil {
		return nil, err
	}
	return s.u16[lo:hi:hi], nil
}

// at returns the storage of a buffer's root and the buffer's element range.
func (w *World[T]) at(rank int, id graph.BufID, dt graph.DType) (s *storage[T], lo, hi int64, err error) {
	p := w.prog
	if rank < 0 || rank >= len(w.ranks) {
		return nil, 0, 0, fmt.Errorf("interp: rank %d of %d", rank, len(w.ranks))
	}
	if id < 0 || int(id) >= len(p.Buffers) {
		return nil, 0, 0, fmt.Errorf("interp: the program has no buffer %d", id)
	}
	b := p.Buf(id)
	r := &w.ranks[rank]
	root, off := p.Resolve(id, r.coord)
	rb := p.Buf(root)
	switch {
	case b.DType != dt || rb.DType != dt:
		return nil, 0, 0, fmt.Errorf("interp: buffer %s is %v in a root of %v, want %v", b.Name, b.DType, rb.DType, dt)
	case off < 0 || off%dt.Size() != 0 || off+b.Bytes() > rb.Bytes():
		return nil, 0, 0, fmt.Errorf("interp: buffer %s is bytes [%d, %d) of %s, which has %d", b.Name, off, off+b.Bytes(), rb.Name, rb.Bytes())
	}
	s = &r.roots[root]
	s.make(dt, rb.Elems())
	lo = off / dt.Size()
	return s, lo, lo + b.Elems(), nil
}

func (s *storage[T]) make(dt graph.DType, n int64) {
	switch {
	case dt == graph.F32 && s.t == nil:
		s.t = make([]T, n)
		fill(s.t, T(math.NaN()))
	case dt == graph.F64 && s.f64 == nil:
		s.f64 = make([]float64, n)
		fill(s.f64, math.NaN())
	case dt == graph.I64 && s.i64 == nil:
		s.i64 = make([]int64, n)
	case dt == graph.I32 && s.i32 == nil:
		s.i32 = make([]int32, n)
	case (dt == graph.BF16 || dt == graph.F16) && s.u16 == nil:
		s.u16 = make([]uint16, n)
		fill(s.u16, 0xFFFF) // NaN in both
	case dt == graph.U8 && s.u8 == nil:
		s.u8 = make([]uint8, n)
	}
}

func fill[E any](s []E, v E) {
	for i := range s {
		s[i] = v
	}
}

// Set copies values into an F32 buffer of every rank.
func (w *World[T]) Set(id graph.BufID, values []T) error {
	for r := range w.ranks {
		dst, err := w.Floats(r, id)
		if err != nil {
			return err
		}
		if len(values) != len(dst) {
			return fmt.Errorf("interp: buffer %s has %d elements, got %d", w.prog.Buf(id).Name, len(dst), len(values))
		}
		copy(dst, values)
	}
	return nil
}

// Ranks returns the world size.
func (w *World[T]) Ranks() int { return len(w.ranks) }

// Run runs a section: its phases in order, each as often as it repeats. Every operation runs on all
// ranks before the next one.
func (w *World[T]) Run(section string) error {
	s := w.prog.Section(section)
	if s == nil {
		return fmt.Errorf("interp: the program has no section %q", section)
	}
	for i := range s.Phases {
		for range max(s.Phases[i].Repeat, 1) {
			if err := w.RunPhase(&s.Phases[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

// RunRank runs a section without collectives on one rank.
func (w *World[T]) RunRank(section string, rank int) error {
	s := w.prog.Section(section)
	if s == nil {
		return fmt.Errorf("interp: the program has no section %q", section)
	}
	for i := range s.Phases {
		ph := &s.Phases[i]
		for range max(ph.Repeat, 1) {
			for j := range ph.Ops {
				if err := w.onRank(ph, &ph.Ops[j], rank); err != nil {
					return fmt.Errorf("interp: phase %s: %s (%s): %w", ph.Name, ph.Ops[j].Name, ph.Ops[j].Kind, err)
				}
			}
		}
	}
	return nil
}

// RunPhase runs the operations of one phase once.
func (w *World[T]) RunPhase(ph *graph.Phase) error {
	for i := range ph.Ops {
		if err := w.runOp(ph, &ph.Ops[i]); err != nil {
			return fmt.Errorf("interp: phase %s: %s (%s): %w", ph.Name, ph.Ops[i].Name, ph.Ops[i].Kind, err)
		}
	}
	return nil
}

// sectionOf returns the section of a phase, or an empty one if the program has none.
func (w *World[T]) sectionOf(ph *graph.Phase) *graph.Section {
	for i := range w.prog.Sections {
		s := &w.prog.Sections[i]
		for j := range s.Phases {
			if &s.Phases[j] == ph {
				return s
			}
		}
	}
	return &graph.Section{}
}

func (w *World[T]) runOp(ph *graph.Phase, op *graph.Op) error {
	s := w.sectionOf(ph)
	if collectives[op.Kind] {
		return runCollective(w, op, s.Present(ph, op))
	}
	for r := range w.ranks {
		if w.prog.Idle(s, ph, op, r) {
			continue
		}
		if err := w.onRank(ph, op, r); err != nil {
			return fmt.Errorf("rank %d: %w", r, err)
		}
	}
	return nil
}

func (w *World[T]) onRank(ph *graph.Phase, op *graph.Op, rank int) error {
	if op.Kind == graph.Join {
		return nil
	}
	run, ok := w.kinds[op.Kind]
	if op.BringsKernels() {
		run, ok = own[T], true
	}
	if !ok {
		return fmt.Errorf("no interpretation of kind %q on one rank", op.Kind)
	}
	c := &call[T]{w: w, rank: rank, op: op, present: w.sectionOf(ph).Present(ph, op)}
	if skip := c.skip(); skip || c.err != nil {
		return c.err
	}
	run(c)
	c.narrow()
	return c.err
}

// call is one operation on one rank. It keeps the first error.
type call[T num.Float] struct {
	w    *World[T]
	rank int
	op   *graph.Op
	err  error

	present []int             // ranks with a micro-batch; nil: all
	half    map[int]tensor[T] // 16-bit outputs, widened until the operation ends
}

func (c *call[T]) skip() bool {
	if c.op.Skip == graph.NoBuf {
		return false
	}
	s, err := c.w.I32(c.rank, c.op.Skip)
	if err != nil {
		c.err = err
		return false
	}
	return s[0] != 0
}

func (c *call[T]) input(i int) graph.BufID {
	if i >= len(c.op.In) {
		return graph.NoBuf
	}
	return c.op.In[i]
}

func (c *call[T]) output(i int) graph.BufID {
	if i >= len(c.op.Out) {
		return graph.NoBuf
	}
	return c.op.Out[i].Buf
}

// accum reports whether output i is added to.
func (c *call[T]) accum(i int) bool { return i < len(c.op.Out) && c.op.Out[i].Mode == graph.Accum }

// tensor is a float operand with its shape as a matrix.
type tensor[T num.Float] struct {
	v          []T
	rows, cols int
	shape      []int64
}

func (c *call[T]) tensor(id graph.BufID) (t tensor[T]) {
	if id == graph.NoBuf || c.err != nil {
		return t
	}
	v, err := c.floats(id)
	if err != nil {
		c.err = err
		return t
	}
	t = tensor[T]{v: v, rows: 1, cols: 1, shape: c.w.prog.Buf(id).Shape}
	for i, d := range t.shape {
		if i == len(t.shape)-1 {
			t.cols = int(d)
		} else {
			t.rows *= int(d)
		}
	}
	return t
}

func (c *call[T]) in(i int) tensor[T] { return c.tensor(c.input(i)) }
func (c *call[T]) out(i int) tensor[T] {
	id := c.output(i)
	if id == graph.NoBuf || !isHalf(c.w.prog.Buf(id).DType) {
		return c.tensor(id)
	}
	t, ok := c.half[i]
	if !ok && c.err == nil {
		if c.half == nil {
			c.half = map[int]tensor[T]{}
		}
		t = c.tensor(id)
		c.half[i] = t
	}
	return t
}

func (c *call[T]) inI32(i int) []int32 {
	v, err := c.w.I32(c.rank, c.input(i))
	c.note(err)
	return v
}

func (c *call[T]) inI64(i int) []int64 {
	v, err := c.w.I64(c.rank, c.input(i))
	c.note(err)
	return v
}

func (c *call[T]) inF64(i int) []float64 {
	v, err := c.w.F64(c.rank, c.input(i))
	c.note(err)
	return v
}

func (c *call[T]) outF64(i int) []float64 {
	v, err := c.w.F64(c.rank, c.output(i))
	c.note(err)
	return v
}

func (c *call[T]) outI64(i int) []int64 {
	v, err := c.w.I64(c.rank, c.output(i))
	c.note(err)
	return v
}

func (c *call[T]) note(err error) {
	if c.err == nil {
		c.err = err
	}
}
