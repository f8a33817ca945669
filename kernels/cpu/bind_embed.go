package cpu

import (
	"fmt"
	"math"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

func bindEmbed(b *binding) func() error {
	v, c := b.inShape(1)
	first, total := b.slice()
	tokens := in[int32](b, 0)
	if b.asIn(1) != vec.NoHalf {
		return b.run(&vec.Embed[uint16]{N: len(tokens), V: v, C: c, Tokens: tokens, Table: in[uint16](b, 1), Y: out[uint16](b, 0), First: first, Total: total})
	}
	return b.run(&vec.Embed[float32]{
		N: len(tokens), V: v, C: c, Tokens: tokens, Table: in[float32](b, 1), Y: out[float32](b, 0), First: first, Total: total,
	})
}

// slice returns the first element of the operation's slice on this rank, and the number of elements
// of all slices; 0 without a slice.
func (b *binding) slice() (first, total int) {
	a, ok := b.Op.Attr.(graph.SliceAttr)
	if !ok {
		return 0, 0
	}
	return b.first(a), int(a.Total)
}

// first returns the first element of a slice on this rank, 0 without a slice.
func (b *binding) first(a graph.SliceAttr) int {
	if a == (graph.SliceAttr{}) || !b.sliceFits(a) {
		return 0
	}
	from, _ := a.Range(b.Coord)
	return int(from)
}

// sliceFits records an error if the rank has no coordinate along the slice's axis.
func (b *binding) sliceFits(a graph.SliceAttr) bool {
	if a.Axis >= len(b.Coord) {
		b.failf("its slice lies along mesh axis %d, the rank has %d coordinates", a.Axis, len(b.Coord))
		return false
	}
	return true
}

func bindEmbedGrad(b *binding) func() error {
	v, c := b.outShape(0)
	first, total := b.slice()
	tokens := in[int32](b, 0)
	if as := b.asIn(1); as != vec.NoHalf {
		work := b.work()
		return b.run(&vec.HalfEmbedGrad{
			As: as, N: len(tokens), V: v, C: c, Tokens: tokens, DY: in[uint16](b, 1), DTable: b.sum(0),
			Order: take[int64](&work, int64(len(tokens))), First: first, Total: total,
		})
	}
	return b.run(&vec.EmbedGrad[float32]{
		N: len(tokens), V: v, C: c, Tokens: tokens, DY: in[float32](b, 1), DTable: out[float32](b, 0), Accumulate: b.accum(0), First: first, Total: total,
	})
}

func bindAddPos(b *binding) func() error {
	n, c := b.inShape(0)
	a := attr[graph.PosAttr](b)
	first := b.first(a.Rows)
	if as := b.asIn(0); as != vec.NoHalf {
		return b.run(vec.HalfAddPos(as, c, first, int(a.Seq), in[uint16](b, 0), in[uint16](b, 1), out[uint16](b, 0), in[float32](b, 2)))
	}
	return b.run(&vec.AddPos[float32]{
		N: n, C: c, Seq: int(a.Seq), First: first, Starts: in[float32](b, 2),
		X: in[float32](b, 0), Pos: in[float32](b, 1), Y: out[float32](b, 0),
	})
}

func bindAddPosGrad(b *binding) func() error {
	n, c := b.inShape(0)
	a := attr[graph.PosAttr](b)
	first := b.first(a.Rows)
	if as := b.asIn(0); as != vec.NoHalf {
		return b.run(&vec.HalfAddPosGrad{As: as, C: c, Seq: int(a.Seq), First: first, Starts: in[float32](b, 1), DY: in[uint16](b, 0), DPos: b.sum(0)})
	}
	return b.run(&vec.AddPosGrad[float32]{
		N: n, C: c, Seq: int(a.Seq), First: first, Starts: in[float32](b, 1),
		DY: in[float32](b, 0), DPos: out[float32](b, 0), Accumulate: b.accum(0),
	})
}

func bindBiasGrad(b *binding) func() error { return columnSums(b, 0, 0) }

// columnSums sums the columns of input from into output to.
func columnSums(b *binding, from, to int) func() error {
	n, c := b.inShape(from)
	if as := b.asIn(from); as != vec.NoHalf {
		return b.run(vec.HalfColumnSum(as, c, in[uint16](b, from), b.sum(to)))
	}
	return b.run(&vec.ColumnSum[float32]{N: n, C: c, X: in[float32](b, from), Y: out[float32](b, to), Accumulate: b.accum(to)})
}

// bindRope computes the table of rotations in workspace at each run. The table is small compared
// with x, and state of a run must be in the arena. With RopeAt each row has its own position
// instead of consecutive ones.
func bindRope(b *binding) func() error {
	a := attr[graph.RopeAttr](b)
	n, _ := b.inShape(0)
	var positions []int32
	var starts []float32
	if b.Op.Kind == graph.RopeAt {
		positions = in[int32](b, 1)
	} else {
		starts = in[float32](b, 1)
	}
	work, x, y := b.work(), b.inMatrix(0), b.outMatrix(0)
	t := &vec.RopeTable[float32]{
		Seq: int(a.Seq), At: positions, D: int(a.HeadDim), Theta: a.Theta, Table: take[float32](&work, a.Seq*a.HeadDim),
		Factor: a.ScaleFactor, LowFreq: a.LowFreq, HighFreq: a.HighFreq, Original: float64(a.OriginalPositions),
	}
	var k runner = &vec.Rope[float32]{
		N: n, Heads: int(a.Heads), D: int(a.HeadDim), Seq: int(a.Seq), Inverse: a.Inverse, X: x.f32, Y: y.f32, Table: t.Table, Starts: starts,
	}
	if as := b.asIn(0); as != vec.NoHalf {
		k = vec.HalfRope(as, int(a.Heads), int(a.HeadDim), int(a.Seq), a.Inverse, x.u16, y.u16, t.Table, starts)
	}
	pool, name := b.pool, b.Op.Name
	return func() error {
		for n, at := range positions {
			if at < 0 {
				return fmt.Errorf("%s (%s): the position of row %d is %d, want at least 0", name, graph.RopeAt, n, at)
			}
		}
		if err := t.Run(pool); err != nil {
			return err
		}
		return k.Run(pool)
	}
}

// bindDropout numbers samples by the Key buffer: see DropoutSample.
func bindDropout(b *binding) func() error {
	a := attr[graph.DropoutAttr](b)
	key, x, y, pool := in[int64](b, 1), b.inMatrix(0), b.outMatrix(0), b.pool
	k := &vec.Dropout[float32]{
		X: x.f32, Y: y.f32, As: b.asIn(0), X16: x.u16, Y16: y.u16, Elems: int(a.Elems), First: b.first(a.Part), P: a.P, Site: uint32(a.Site),
	}
	return func() error {
		k.Seed, k.Sample = uint64(key[graph.KeySeed]), DropoutSample(key)
		return k.Run(pool)
	}
}

// DropoutSample returns the number that identifies a sample in dropout's random stream. The low 40
// bits are the global sample index, the higher bits are the step, so a sample that is used again
// drops other elements. key is the program's Key buffer.
func DropoutSample(key []int64) uint64 {
	return uint64(key[graph.KeyStep])<<40 + uint64(key[graph.KeySample])
}

func bindSelectRow(b *binding) func() error {
	if b.asIn(0) != vec.NoHalf {
		return selectRow(b, in[uint16](b, 0), out[uint16](b, 0))
	}
	return selectRow(b, in[float32](b, 0), out[float32](b, 0))
}

func selectRow[T any](b *binding, x, y []T) func() error {
	n, c := b.inShape(0)
	key := in[int64](b, 1)
	name := b.Op.Name
	return func() error {
		r := key[graph.KeyRow]
		if r < 0 || r >= int64(n) {
			return fmt.Errorf("%s (%s): row is %d, want one of the %d rows of x", name, graph.SelectRow, r, n)
		}
		copy(y, x[int(r)*c:int(r+1)*c])
		return nil
	}
}

func bindSum(b *binding) func() error {
	work, x := b.work(), b.gradient(0)
	n := max(len(x.f32), len(x.half.X))
	return b.run(&vec.Sum[float32]{
		X: x.f32, X16: x.half, Y: out[float64](b, 0), Work: take[float64](&work, int64(vec.SumWork(n))), Accumulate: b.accum(0),
	})
}

func bindSumGrad(b *binding) func() error {
	dy := in[float64](b, 0)
	pool := b.pool
	if as := b.asOut(0); as != vec.NoHalf {
		value := new(float32)
		k := vec.HalfFill(as, out[uint16](b, 0), value, b.accum(0))
		return func() error {
			*value = float32(dy[0])
			return k.Run(pool)
		}
	}
	k := &vec.Fill[float32]{Y: out[float32](b, 0), Accumulate: b.accum(0)}
	return func() error {
		k.Value = float32(dy[0])
		return k.Run(pool)
	}
}

// filler sets all elements of y to v. Each task of the pool sets fillGrain of them.
type filler[T any] struct {
	y []T
	v T
}

const fillGrain = 1 << 15 // elements in one task

func (f *filler[T]) RunIndex(i int) {
	y := f.y[i*fillGrain : min((i+1)*fillGrain, len(f.y))]
	for j := range y {
		y[j] = f.v
	}
}

func bindFill(b *binding) func() error {
	v := attr[graph.FillAttr](b).Value
	dt := b.Program.Buf(b.Op.Out[0].Buf).DType
	switch dt {
	case graph.F32:
		return b.run(&vec.Fill[float32]{Y: out[float32](b, 0), Value: float32(v)})
	case graph.F64:
		return fill(b, out[float64](b, 0), v)
	case graph.BF16:
		return fill(b, out[uint16](b, 0), num.BF16(float32(v)))
	case graph.F16:
		return fill(b, out[uint16](b, 0), num.F16(float32(v)))
	}
	lo, hi := -math.Ldexp(1, int(dt.Size())*8-1), math.Ldexp(1, int(dt.Size())*8-1)
	if dt == graph.U8 {
		lo, hi = 0, 256
	}
	if v != math.Trunc(v) || v < lo || v >= hi {
		b.failf("value %g is no %v", v, dt)
		return nil
	}
	switch dt {
	case graph.I64:
		return fill(b, out[int64](b, 0), int64(v))
	case graph.I32:
		return fill(b, out[int32](b, 0), int32(v))
	case graph.I8:
		return fill(b, out[int8](b, 0), int8(v))
	default:
		return fill(b, out[uint8](b, 0), uint8(v))
	}
}

func fill[T any](b *binding, y []T, v T) func() error {
	k := &filler[T]{y, v}
	pool := b.pool
	return func() error {
		pool.Run((len(k.y)+fillGrain-1)/fillGrain, k)
		return nil
	}
}
