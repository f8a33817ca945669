package cuda

import (
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

func init() {
	register(map[graph.Kind]binder{
		graph.LayerNorm:     bindLayerNorm,
		graph.LayerNormGrad: func(b *binding) { b.normGrad(b.in(3), b.in(4), b.out(2), b.accum(2)) },
		graph.RMSNorm:       bindRMSNorm,
		graph.RMSNormGrad:   func(b *binding) { b.normGrad(0, b.in(3), 0, 0) },
	})
}

const norm = "norm.cu"

// normThreads is the block of a row: by its width alone, on which the sums'
// order rests.
func normThreads(cols int64) int64 {
	switch {
	case cols <= 128:
		return 32
	case cols <= 1024:
		return 128
	case cols <= 4096:
		return 256
	}
	return 512
}

// normKept is the dynamic shared memory of a block that keeps n values of each of a
// row's columns, and whether it does: beyond 32 KiB too few blocks would run at once.
func normKept(cols, n int64) (shared int, keep int32) {
	if bytes := 4 * n * roundUp(cols, 4); bytes <= 32<<10 {
		return int(bytes), 1
	}
	return 0, 0
}

func bindLayerNorm(b *binding) {
	n, c := matrix(b.outBuf(0))
	shared, keep := normKept(c, 1)
	b.rows(norm, "layernorm_"+b.float(b.outBuf(0)), n, normThreads(c), shared,
		b.args().Pointer(b.in(0)).Pointer(b.in(1)).Pointer(b.in(2)).Pointer(b.out(0)).Pointer(b.out(1)).Pointer(b.out(2)).
			Int64(c).Float32(float32(attr[graph.NormAttr](b).Eps)).Int32(keep))
}

func bindRMSNorm(b *binding) {
	n, c := matrix(b.outBuf(0))
	shared, keep := normKept(c, 1)
	b.rows(norm, "rmsnorm_"+b.float(b.outBuf(0)), n, normThreads(c), shared,
		b.args().Pointer(b.in(0)).Pointer(b.in(1)).Pointer(b.out(0)).Pointer(b.out(1)).
			Int64(c).Float32(float32(attr[graph.NormAttr](b).Eps)).Int32(keep))
}

// normGrad is the gradient of a layer norm, or with no mean of an RMS norm. The
// columns come first, as on the CPU.
func (b *binding) normGrad(mean, rstd, dbeta driver.Address, accumBeta int32) {
	x := b.inBuf(1)
	n, c := matrix(x)
	if b.hasOut(1) || b.hasOut(2) {
		grad := graph.F32
		for _, i := range []int{1, 2} {
			if b.hasOut(i) {
				grad = b.outBuf(i).DType
			}
		}
		if b.hasOut(1) && b.hasOut(2) && b.outBuf(1).DType != b.outBuf(2).DType {
			// One launch for each: a kernel writes gradients of one type.
			b.normColumns(x, b.outBuf(1).DType, mean, rstd, n, c, b.out(1), 0, b.accum(1), 0)
			b.normColumns(x, b.outBuf(2).DType, mean, rstd, n, c, 0, dbeta, 0, accumBeta)
		} else {
			b.normColumns(x, grad, mean, rstd, n, c, b.out(1), dbeta, b.accum(1), accumBeta)
		}
	}
	if b.hasOut(0) {
		shared, keep := normKept(c, 2)
		b.rows(norm, "norm_dx_"+b.float(x), n, normThreads(c), shared,
			b.args().Pointer(b.in(0)).Pointer(b.in(1)).Pointer(b.in(2)).Pointer(mean).Pointer(rstd).Pointer(b.out(0)).Int64(c).Int32(b.accum(0)).Int32(keep))
	}
}

func (b *binding) normColumns(x *graph.Buffer, grad graph.DType, mean, rstd driver.Address, n, c int64, dgamma, dbeta driver.Address, accumGamma, accumBeta int32) {
	width := 32 / x.DType.Size() // columns of a block
	b.rows(norm, "norm_columns_"+b.float(x)+"_"+suffix[grad], (c+width-1)/width, 256, 0,
		b.args().Pointer(b.in(0)).Pointer(b.in(1)).Pointer(mean).Pointer(rstd).Pointer(dgamma).Pointer(dbeta).
			Int64(n).Int64(c).Int32(accumGamma).Int32(accumBeta))
}
