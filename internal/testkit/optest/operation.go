// Package optest draws random operations of every kind, and computes their expected results, for
// tests of the packages that run them.
package optest

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/interp"
	"github.com/spillway-ml/spillway/kernels"
	"github.com/spillway-ml/spillway/kernels/cpu/exact"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/zero"
)

// Operation is a program of one operation on random data.
type Operation struct {
	P      *graph.Program
	Rank   int
	Before map[graph.BufID][]byte // contents of the operands; workspace has none

	rng     *rand.Rand
	aligned bool
}

// Options of an Operation.
type Options struct {
	Target graph.Target // determines the operation's workspace
	// Half makes the values bf16 where the kind table allows it, and parameter gradients bf16 or
	// f32.
	Half bool
	// F16 makes them f16 instead.
	F16 bool
	// Large draws shapes larger than a block of threads, for kinds that have such shapes.
	Large bool
	// Aligned places every operand at a multiple of Layout's alignment.
	Aligned bool
	// Finite keeps infinities out of the values.
	Finite bool
}

// Kinds returns the kinds of which operations can be drawn, sorted by name: all but collectives,
// copies and joins.
func Kinds() []graph.Kind {
	return slices.Sorted(func(yield func(graph.Kind) bool) {
		maps.Keys(shapes)(yield)
		maps.Keys(rules)(yield)
	})
}

// rules are the operations of the update rules whose kernels are in the kernel packages.
var rules = func() map[graph.Kind]*graph.Operation {
	m := map[graph.Kind]*graph.Operation{}
	for _, op := range zero.Operations() {
		if op.Definition().Library {
			m[op.Kind()] = op
		}
	}
	return m
}()

// Everywhere returns the kinds for which every device has kernels. The other kinds have only CPU
// kernels: those of generation with cached keys and values, quantised values, soft caps, vocabulary
// slices, sums as a loss, and Muon.
func Everywhere() []graph.Kind {
	alone := []graph.Kind{graph.RopeAt, graph.AttentionCached, graph.Quantize, graph.Dequantize, graph.DequantizeSum, graph.SoftCap, graph.SoftCapGrad,
		graph.HeadStats, graph.HeadLSE, graph.HeadSliceGrad, graph.LossSeed, graph.NewtonSchulz, "muon_momentum", "muon_apply"}
	return slices.DeleteFunc(Kinds(), func(k graph.Kind) bool { return slices.Contains(alone, k) })
}

// HasLarge reports whether the kind has shapes for Options.Large.
func HasLarge(kind graph.Kind) bool { return largeShapes[kind] != nil || rules[kind] != nil }

// Op returns the operation.
func (o *Operation) Op() *graph.Op { return &o.P.Sections[0].Phases[0].Ops[0] }

// New draws an operation of the kind: its shapes, optional operands, output modes and contents.
func New(kind graph.Kind, rng *rand.Rand, opts Options) *Operation {
	if own := rules[kind]; own != nil {
		return draw(kind, own, updateShapes(rng, own.Definition().In, own.Definition().Out, opts.Large), rng, opts)
	}
	shape := shapes[kind]
	if large, ok := largeShapes[kind]; ok && opts.Large {
		shape = large
	}
	return draw(kind, nil, opts.built(kind, shape, rng), rng, opts)
}

// built draws shapes for which the target has kernels.
func (opts Options) built(kind graph.Kind, shape func(*rand.Rand) spec, rng *rand.Rand) spec {
	for {
		s := shape(rng)
		if opts.Target.Lacks(&graph.Op{Kind: kind, Attr: s.attr}) == "" {
			return s
		}
	}
}

// Of is New with a given attribute and given shapes, in the kind table's order. Tokens and targets
// are below classes.
func Of(kind graph.Kind, attr any, in, out [][]int64, classes int, rng *rand.Rand, opts Options) *Operation {
	return draw(kind, nil, spec{attr: attr, in: in, out: out, classes: classes}, rng, opts)
}

// OfOwn is Of for a user-defined operation.
func OfOwn(own *graph.Operation, attr any, in, out [][]int64, rng *rand.Rand, opts Options) *Operation {
	return draw(own.Kind(), own, spec{attr: attr, in: in, out: out}, rng, opts)
}

func draw(kind graph.Kind, own *graph.Operation, s spec, rng *rand.Rand, opts Options) *Operation {
	op := graph.Op{Kind: kind, Own: own, Name: "op", Attr: s.attr, Work: graph.NoBuf, Skip: graph.NoBuf, Unit: -1}
	info, _ := op.Info()
	ins, outs := info.Operands(s.attr)
	outs = outs[:min(len(outs), len(s.out))] // without scales: the moments drawn are f32
	o := &Operation{P: &graph.Program{}, rng: rng, aligned: opts.Aligned, Before: map[graph.BufID][]byte{}}
	if s.unit != nil {
		o.P.Mesh = []graph.Axis{{Name: "data", Size: s.world}}
		o.P.Params, o.P.Units = s.params, []graph.Unit{*s.unit}
		o.Rank = rng.IntN(s.world)
	}
	if s.types != nil { // the kind table has several, the kernels these
		ins, outs = slices.Clone(ins), slices.Clone(outs)
		ins[0].Types, outs[0].Types = s.types[:1], s.types[1:]
		if kind == graph.Cast && s.types[1] != graph.F32 {
			outs[0].Modes = outs[0].Modes[:1]
		}
	}
	if opts.Half {
		ins, outs = half(ins, rng, opts.compute()), half(outs, rng, opts.compute())
	}
	s.finite = opts.Finite
	for i, d := range ins {
		if opts.leavesOut(i, d, s) {
			continue
		}
		if d.Optional && rng.IntN(3) == 0 {
			op.In = append(op.In, graph.NoBuf)
			continue
		}
		op.In = append(op.In, o.buffer(d, s.in[i], s))
	}
	absent := -1
	if n := slices.IndexFunc(outs, func(d graph.Operand) bool { return d.Optional }); n >= 0 && rng.IntN(2) == 0 {
		absent = n + rng.IntN(len(outs)-n)
	}
	if kind == graph.Linear && s.attr.(graph.LinearAttr).Act == graph.ActNone {
		absent = 1 // pre belongs to an activation
	}
	for i, d := range outs {
		if i == absent {
			op.Out = append(op.Out, graph.Out{Buf: graph.NoBuf})
			continue
		}
		over := slices.IndexFunc(ins, func(in graph.Operand) bool { return d.Over != "" && in.Name == d.Over })
		if over >= 0 && rng.IntN(2) == 0 {
			op.Out = append(op.Out, graph.Out{Buf: op.In[over], Mode: graph.ReadWrite})
			continue
		}
		if len(d.Types) == 0 {
			d.Types = []graph.DType{[]graph.DType{graph.F32, graph.F64, graph.I64, graph.I32}[rng.IntN(4)]}
		}
		op.Out = append(op.Out, graph.Out{Buf: o.buffer(d, s.out[i], s), Mode: d.Modes[rng.IntN(len(d.Modes))]})
	}
	if rng.IntN(4) == 0 {
		op.Skip = o.P.AddBuffer(graph.Buffer{Name: "skip", DType: graph.I32, Shape: []int64{1}})
		o.Before[op.Skip] = Bytes([]int32{int32(rng.IntN(2))})
	}
	o.P.Sections = []graph.Section{{Name: "s", Phases: []graph.Phase{{Name: "p", Repeat: 1, Ops: []graph.Op{op}}}}}
	o.P = graph.AddWorkspace(o.P, opts.Target)
	return o
}

// buffer adds an operand with contents that suit its name.
func (o *Operation) buffer(d graph.Operand, shape []int64, s spec) graph.BufID {
	id := o.P.AddBuffer(graph.Buffer{Name: d.Name, DType: d.Types[0], Shape: shape, Unit: -1})
	n, rng := o.P.Buf(id).Elems(), o.rng
	switch d.Types[0] {
	case graph.BF16, graph.F16:
		v := make([]uint16, n)
		for i := range v {
			v[i] = uint16(rng.Uint32())
			if d.Float != graph.AnyFloat || d.Name == "g" { // values: not any bits
				v[i] = num.BF16(float32(rng.NormFloat64()))
				if d.Types[0] == graph.F16 {
					v[i] = num.F16(float32(rng.NormFloat64()))
				}
			}
		}
		o.Before[id] = Bytes(v)
	case graph.F32:
		v := make([]float32, n)
		for i := range v {
			v[i] = float32(rng.NormFloat64())
			switch d.Name {
			case "v", "rstd", "coef":
				v[i] = float32(math.Abs(float64(v[i])))
			}
		}
		if d.Name == startsName {
			seq, from := seqOf(s.attr)
			documents(v, seq, from, rng)
		} else if !s.finite && s.unit == nil && d.Name != "coef" && rng.IntN(8) == 0 {
			v[rng.IntN(len(v))] = float32(math.Inf(1 - 2*rng.IntN(2)))
		}
		o.Before[id] = Bytes(v)
	case graph.F64:
		v := make([]float64, n)
		for i := range v {
			v[i] = rng.Float64() + 0.1
		}
		o.Before[id] = Bytes(v)
	case graph.I64:
		v := make([]int64, n)
		switch {
		case d.Name == "key":
			v = []int64{rng.Int64(), rng.Int64N(1000), rng.Int64N(1000), rng.Int64N(int64(max(s.classes, 1))), 1, 0, 0, 0}
			v[graph.KeySlot] = rng.Int64N(int64(max(s.slots, 1)))
		default: // exact accumulators
			for i := 0; i+exact.Limbs <= len(v); i += exact.Limbs {
				exact.Accumulator(v[i : i+exact.Limbs]).Add(rng.Float64() * 100)
				if s.overflows && rng.IntN(2) == 0 {
					exact.Accumulator(v[i : i+exact.Limbs]).Add([]float64{math.Inf(1), math.NaN()}[rng.IntN(2)])
				}
			}
		}
		o.Before[id] = Bytes(v)
	case graph.U8: // codes and scales
		v := make([]byte, n)
		for i := range v {
			v[i] = byte(rng.Uint32())
		}
		if a, ok := s.attr.(graph.QuantAttr); ok {
			quantScales(v, a, rng)
		}
		o.Before[id] = v
	default:
		v := make([]int32, n)
		for i := range v {
			v[i] = int32(rng.IntN(max(s.classes, 1)))
			if d.Name == "targets" && rng.IntN(5) == 0 {
				v[i] = -1
			}
		}
		o.Before[id] = Bytes(v)
	}
	return id
}

// startsName is the operand with the starts of documents.
const startsName = "starts"

// documents writes the starts of documents of random lengths, in samples of seq rows, beginning at
// row from.
func documents(starts []float32, seq, from int64, rng *rand.Rand) {
	most := 1 + rng.IntN(2*int(seq))
	first, left := 0, 0
	for i := range starts {
		t := (int(from) + i) % int(seq)
		if t == 0 || left == 0 {
			first, left = t, 1+rng.IntN(most)
		}
		starts[i] = float32(first)
		left--
	}
}

// seqOf returns the rows of a sample, and the index of the operation's first row among all rows.
func seqOf(attr any) (seq, from int64) {
	switch a := attr.(type) {
	case graph.PosAttr:
		from, _ = a.Rows.Range(nil)
		return a.Seq, from
	case graph.RopeAttr:
		return a.Seq, 0
	case graph.AttentionAttr:
		return a.Seq, 0
	}
	return 1, 0
}

// quantScales writes the scales of quantised values, for parts of any length.
func quantScales(q []byte, a graph.QuantAttr, rng *rand.Rand) {
	part := len(q) / int(a.Parts)
	blocks := 1
	for a.Bytes(int64(blocks)*a.Block) < int64(len(q)) {
		blocks++
	}
	for p := range int(a.Parts) {
		scales := Values[float32](q[(p+1)*part-4*blocks : (p+1)*part])
		for i := range scales {
			scales[i] = float32(math.Abs(rng.NormFloat64()))
		}
	}
}

// Interpret returns the bytes of every operand after the operation, computed by package interp: f32
// as on the CPU, 16-bit results rounded once.
func (o *Operation) Interpret() (map[graph.BufID][]byte, error) {
	w := interp.New[float32](o.P)
	memory := func(id graph.BufID) ([]byte, error) {
		switch o.P.Buf(id).DType {
		case graph.F32:
			v, err := w.Floats(o.Rank, id)
			return Bytes(v), err
		case graph.F64:
			v, err := w.F64(o.Rank, id)
			return Bytes(v), err
		case graph.I64:
			v, err := w.I64(o.Rank, id)
			return Bytes(v), err
		case graph.I32:
			v, err := w.I32(o.Rank, id)
			return Bytes(v), err
		case graph.U8:
			return w.U8(o.Rank, id)
		}
		v, err := w.U16(o.Rank, id)
		return Bytes(v), err
	}
	for id, v := range o.Before {
		dst, err := memory(id)
		if err != nil {
			return nil, err
		}
		copy(dst, v)
	}
	if err := w.RunRank("s", o.Rank); err != nil {
		return nil, err
	}
	after := map[graph.BufID][]byte{}
	for id := range o.Before {
		b, err := memory(id)
		if err != nil {
			return nil, err
		}
		after[id] = b
	}
	return after, nil
}

// Layout draws the buffers' places in an arena, with gaps between them. They start at multiples of
// only the element's size, unless the operation is Aligned; workspace starts at multiples of align.
// It returns the offsets by buffer and the total bytes.
func (o *Operation) Layout(align int64) (offsets []int64, size int64) {
	off := int64(0)
	for id := range o.P.Buffers {
		b := &o.P.Buffers[id]
		off = (off + 64 + align - 1) / align * align
		if b.DType != graph.U8 && !o.aligned {
			off += o.rng.Int64N(16) * b.DType.Size()
		}
		offsets = append(offsets, off)
		off += b.Bytes()
	}
	return offsets, off + 64
}

// Binding returns the operation with its operands in arena at the offsets.
func (o *Operation) Binding(arena device.Arena, offsets []int64) kernels.Binding {
	op := o.Op()
	b := kernels.Binding{Program: o.P, Op: op}
	if o.P.Mesh != nil {
		b.Coord = []int{o.Rank}
	}
	ptr := func(id graph.BufID) device.Ptr {
		if id == graph.NoBuf {
			return device.Ptr{}
		}
		return device.Ptr{Arena: arena, Off: offsets[id], Len: o.P.Buf(id).Bytes()}
	}
	for _, id := range op.In {
		b.In = append(b.In, ptr(id))
	}
	for _, q := range op.Out {
		b.Out = append(b.Out, ptr(q.Buf))
	}
	b.Work, b.Skip = ptr(op.Work), ptr(op.Skip)
	return b
}

// compute returns the type of values under Options.Half.
func (o *Options) compute() graph.DType {
	if o.F16 {
		return graph.F16
	}
	return graph.BF16
}

// half returns operands whose values are of a 16-bit type.
func half(list []graph.Operand, rng *rand.Rand, dt graph.DType) []graph.Operand {
	list = slices.Clone(list)
	for i, d := range list {
		if d.Name == "low" && rng.IntN(2) == 0 {
			list[i].Types = []graph.DType{graph.F16}
		}
		if d.Float == graph.ComputeFloat || (d.Float == graph.GradFloat || d.Name == "g" && len(d.Types) > 1) && rng.IntN(2) == 0 {
			list[i].Types = []graph.DType{dt}
			if d.Float == graph.AnyFloat && rng.IntN(2) == 0 { // a gradient that is an update's input
				list[i].Types = []graph.DType{graph.F16}
			}
		}
	}
	return list
}

// leavesOut reports whether an input has no shape, or the target's kernels do not accept it.
func (opts Options) leavesOut(i int, d graph.Operand, s spec) bool {
	return i >= len(s.in) || d.Name == startsName && opts.Target.Name != graph.CPUTarget().Name
}

// Big draws an operation of a kind that needs workspace, with shapes at which the workspace reaches
// its bounds. Buffers have no contents. For other kinds it returns false.
func Big(kind graph.Kind, rng *rand.Rand, opts Options) (*graph.Program, *graph.Op, bool) {
	draw, ok := bigShapes[kind]
	if !ok && opts.Half {
		draw, ok = bigHalfShapes[kind]
	}
	if !ok {
		return nil, nil, false
	}
	s := opts.built(kind, draw, rng)
	info, _ := graph.InfoOf(kind)
	ins, outs := info.Operands(s.attr)
	if opts.Half {
		ins, outs = half(ins, rng, opts.compute()), half(outs, rng, opts.compute())
	}
	p := &graph.Program{}
	op := &graph.Op{Kind: kind, Name: "op", Attr: s.attr, Work: graph.NoBuf, Skip: graph.NoBuf, Unit: -1}
	for i, d := range ins {
		if opts.leavesOut(i, d, s) {
			continue
		}
		op.In = append(op.In, p.AddBuffer(graph.Buffer{Name: d.Name, DType: d.Types[0], Shape: s.in[i]}))
	}
	for i, d := range outs {
		o := graph.Out{Buf: graph.NoBuf}
		if !d.Optional || rng.IntN(2) == 0 && kind != graph.Linear {
			o = graph.Out{Buf: p.AddBuffer(graph.Buffer{Name: d.Name, DType: d.Types[0], Shape: s.out[i]}), Mode: d.Modes[0]}
		}
		op.Out = append(op.Out, o)
	}
	return p, op, true
}

// Unit draws a program of one unit of parameters with padding between them, some
// frozen, some without decay, over a mesh of several ranks.
func Unit(rng *rand.Rand) *graph.Program {
	s, _ := units(rng)
	return &graph.Program{Mesh: []graph.Axis{{Name: "data", Size: s.world}}, Params: s.params, Units: []graph.Unit{*s.unit}}
}

// SameBits compares two contents of a buffer element by element. All NaNs are equal, because their
// payload and sign are undefined.
func SameBits(dt graph.DType, a, b []byte) bool {
	if slices.Equal(a, b) {
		return true
	}
	switch dt {
	case graph.F32:
		return slices.EqualFunc(Values[float32](a), Values[float32](b), func(x, y float32) bool {
			return math.Float32bits(x) == math.Float32bits(y) || x != x && y != y
		})
	case graph.BF16, graph.F16:
		infinity := uint16(0x7f80)
		if dt == graph.F16 {
			infinity = 0x7c00
		}
		return slices.EqualFunc(Values[uint16](a), Values[uint16](b), func(x, y uint16) bool {
			return x == y || x&0x7fff > infinity && y&0x7fff > infinity
		})
	case graph.I64: // exact accumulators: their digits carry as they were added
		return slices.Equal(normalized(a), normalized(b))
	case graph.F64:
		return slices.EqualFunc(Values[float64](a), Values[float64](b), func(x, y float64) bool {
			return math.Float64bits(x) == math.Float64bits(y) || x != x && y != y
		})
	}
	return false
}

func normalized(b []byte) []int64 {
	v := slices.Clone(Values[int64](b))
	for i := 0; i+exact.Limbs <= len(v); i += exact.Limbs {
		exact.Accumulator(v[i : i+exact.Limbs]).Normalize()
	}
	return v
}

// Head prints the first elements.
func Head(dt graph.DType, b []byte) string {
	if dt == graph.F32 {
		v := Values[float32](b)
		return fmt.Sprint(v[:min(len(v), 24)])
	}
	return fmt.Sprint(b[:min(len(b), 64)])
}
