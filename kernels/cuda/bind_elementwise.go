package cuda

import (
	"math"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
)

const elementwise = "elementwise.cu"

// elementwise adds the launch of a kernel over the elements of output 0. The kernel's parameters
// are the operands, the number of elements, a flag for accumulation if it can accumulate, and
// scalars.
func (b *binding) elementwise(name string, accumulates bool, scalars ...float32) {
	y := b.outBuf(0)
	args := b.operands().Int64(y.Elems())
	if accumulates {
		args.Int32(b.accum(0))
	}
	for _, v := range scalars {
		args.Float32(v)
	}
	b.over(elementwise, name+"_"+b.float(y), y.Elems(), perThread(y), args)
}

// sumPiece is the number of elements of a partial sum: PIECE of sum.cu.
const sumPiece = 65536

func bindSum(b *binding) {
	x := b.inBuf(0)
	pieces := (x.Elems() + sumPiece - 1) / sumPiece
	work := b.work(8 * pieces)
	b.rows("sum.cu", "sum_pieces_"+b.float(x), pieces, threads, 0, b.args().Pointer(b.in(0)).Pointer(work).Int64(x.Elems()))
	b.rows("sum.cu", "sum_total", 1, threads, 0, b.args().Pointer(work).Pointer(b.out(0)).Int64(pieces).Int32(b.accum(0)))
}

// bindFill converts the value as kernels/cpu does.
func bindFill(b *binding) {
	v, y := attr[graph.FillAttr](b).Value, b.outBuf(0)
	var bits uint64
	switch dt := y.DType; dt {
	case graph.F32:
		bits = uint64(math.Float32bits(float32(v)))
	case graph.F64:
		bits = math.Float64bits(v)
	case graph.BF16:
		bits = uint64(num.BF16(float32(v)))
	case graph.F16:
		bits = uint64(num.F16(float32(v)))
	default:
		lo, hi := -math.Ldexp(1, int(dt.Size())*8-1), math.Ldexp(1, int(dt.Size())*8-1)
		if dt == graph.U8 {
			lo, hi = 0, 256
		}
		if v != math.Trunc(v) || v < lo || v >= hi {
			b.failf("value %g is no %v", v, dt)
			return
		}
		bits = uint64(int64(v))
	}
	name := map[int64]string{1: "fill_1", 2: "fill_2", 4: "fill_4", 8: "fill_8"}[y.DType.Size()]
	b.over(elementwise, name, y.Elems(), perThread(y), b.args().Pointer(b.out(0)).Int64(y.Elems()).Uint64(bits))
}

// bindCast converts f32 to 16 bits or 16 bits to f32, as the CPU does.
func bindCast(b *binding) {
	src, dst := b.inBuf(0).DType, b.outBuf(0).DType
	if (src == graph.F32) == (dst == graph.F32) {
		b.failf("%v to %v; the kernel converts between f32 and 16 bits", src, dst)
		return
	}
	if dst != graph.F32 && b.accum(0) != 0 {
		b.failf("accumulates into %v; the kernel accumulates in f32", dst)
		return
	}
	n := b.outBuf(0).Elems()
	b.over(elementwise, "cast_"+suffix[src]+"_"+suffix[dst], n, 8, b.args().Pointer(b.in(0)).Pointer(b.out(0)).Int64(n).Int32(b.accum(0)))
}

// bindSumParts adds consecutive parts, as the CPU does.
func bindSumParts(b *binding) {
	parts, sum := b.inBuf(0), b.outBuf(0)
	name, ok := map[graph.DType]string{graph.F32: "f32", graph.BF16: "bf16", graph.F16: "f16", graph.F64: "f64"}[parts.DType]
	if !ok {
		b.failf("no sum of parts of %v", parts.DType)
		return
	}
	sequential := attr[graph.SumPartsAttr](b).Order == graph.SumSequential
	n, count := sum.Elems(), parts.Elems()/sum.Elems()
	shared := treeLevel(parts.DType) * treeLevels(count)
	if sequential {
		shared = 0
	}
	b.blocks("sum.cu", "sum_parts_"+name, n, perThread(parts), treeThreads, shared, b.args().Pointer(b.in(0)).Pointer(b.out(0)).Int64(n).Int64(count).Int32(flag(sequential)).Int32(b.accum(0)))
}

// maxDropout is the largest number of elements of a sample whose dropout counters still
// fit in 32 bits.
const maxDropout = 1 << 34

func bindDropout(b *binding) {
	a, y := attr[graph.DropoutAttr](b), b.outBuf(0)
	if a.Elems > maxDropout {
		b.failf("Elems is %d, want at most %d", a.Elems, int64(maxDropout))
		return
	}
	samples := y.Elems() / a.Elems
	b.overRows(elementwise, "dropout_"+b.float(y), samples, (a.Elems+63)/64*16, perThread(y),
		b.args().Pointer(b.in(0)).Pointer(b.out(0)).Int64(samples).Int64(a.Elems).Pointer(b.in(1)).
			Int32(int32(uint32(a.Site))).Int32(int32(uint32(math.Ldexp(a.P, 32)))).Float32(float32(1/(1-a.P))))
}
