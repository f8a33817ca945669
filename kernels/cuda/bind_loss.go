package cuda

import (
	"fmt"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
)

const loss = "loss.cu"

// mostRowThreads is the largest number of threads of one row in loss.cu: ROW_THREADS.
const mostRowThreads = 256

// rowThreads returns the number of threads for a row of cols elements: a whole number of
// warps with at least four elements a thread, at most mostRowThreads.
func rowThreads(cols int64) int64 { return min(roundUp(roundUp(cols, 4)/4, 32), mostRowThreads) }

// fours returns 1 if rows of cols elements at these addresses can be read four elements
// at a time, else 0.
func fours(t graph.DType, cols int64, places ...driver.Address) int32 {
	return flag(cols%4 == 0 && aligned(driver.Address(4*t.Size()), places...))
}

func bindSoftmax(b *binding) {
	x := b.inBuf(0)
	rows, cols := matrix(x)
	b.rows(loss, "softmax_"+b.float(x), rows, rowThreads(cols), 0,
		b.args().Pointer(b.in(0)).Pointer(b.out(0)).Int64(cols).Int32(fours(x.DType, cols, b.in(0), b.out(0))))
}

func bindSoftmaxGrad(b *binding) {
	x := b.inBuf(0)
	rows, cols := matrix(x)
	b.rows(loss, "softmax_grad_"+b.float(x), rows, rowThreads(cols), 0,
		b.args().Pointer(b.in(0)).Pointer(b.in(1)).Pointer(b.out(0)).Int64(cols).
			Int32(fours(x.DType, cols, b.in(0), b.in(1), b.out(0))).Int32(b.accum(0)))
}

// targets returns the address at which a kernel reports a target that is not a class.
func (b *binding) targets(classes int64) driver.Address {
	return b.report("targets", fmt.Sprintf("-1 to %d", classes-1))
}

func bindCrossEntropy(b *binding) {
	rows, cols := matrix(b.inBuf(0))
	rowLoss := b.work(8 * rows)
	b.rows(loss, "cross_entropy", rows, rowThreads(cols), 0,
		b.args().Pointer(b.in(0)).Int64(cols).Int32(fours(graph.F32, cols, b.in(0))).Pointer(b.in(1)).
			Pointer(b.out(1)).Pointer(rowLoss).Pointer(b.targets(cols)))
	b.sumLoss(rowLoss, rows)
}

// sumLoss adds the launch of a kernel that sums the rows' losses into output 0.
func (b *binding) sumLoss(rowLoss driver.Address, rows int64) {
	b.rows(loss, "loss_sum", 1, mostRowThreads, 0, b.args().Pointer(rowLoss).Int64(rows).Pointer(b.out(0)))
}

// hyper returns the addresses of the two factors of a loss's gradient, which are the first
// two elements of input i.
func (b *binding) hyper(i int) (invCount, lossScale driver.Address) {
	at := b.in(i)
	return at + 8*graph.HyperInvCount, at + 8*graph.HyperLossScale
}

func bindCrossEntropyGrad(b *binding) {
	rows, cols := matrix(b.inBuf(0))
	invCount, lossScale := b.hyper(3)
	b.rows(loss, "cross_entropy_grad", rows, rowThreads(cols), 0,
		b.args().Pointer(b.in(0)).Int64(cols).Int32(fours(graph.F32, cols, b.in(0), b.out(0))).Pointer(b.in(1)).Pointer(b.in(2)).
			Pointer(invCount).Pointer(lossScale).Pointer(b.out(0)).Pointer(b.targets(cols)))
}

// bindHeadLoss binds the loss of logits x·wᵀ and its gradients. The workspace holds the
// logits of one chunk of rows at a time:
//
//	for each chunk of rows of x:
//		logits = x·wᵀ                          fp32 (rows, V), rows padded
//		loss of its rows; logits = (softmax − onehot)·scale in place, in x's type
//		loss += Σ of its rows
//		dx = logits·w                          (rows, C)
//		dw (+)= logitsᵀ·x                      (V, C)
//
// If the vocabulary is not a multiple of 8, each product is split in two: see wholePacks.
// A bf16 gradient of the logits overwrites the first half of its fp32 row. A 16-bit dw is
// summed over chunks in fp32, in the workspace, and rounded once.
func bindHeadLoss(b *binding) {
	xBuf, wBuf := b.inBuf(0), b.inBuf(1)
	n, c := matrix(xBuf)
	v, _ := matrix(wBuf)
	x, w, targets := b.in(0), b.in(1), b.in(2)
	typ, name := xBuf.DType, "head_"+b.float(xBuf)
	size := driver.Address(typ.Size())
	hasX, hasW := b.Op.Kind == graph.HeadLossGrad && b.hasOut(1), b.Op.Kind == graph.HeadLossGrad && b.hasOut(2)
	var invCount, lossScale driver.Address
	if hasX || hasW {
		invCount, lossScale = b.hyper(3)
	}

	rows, ld := min(n, cut.HeadChunk(v)), cut.LogitStride(v)
	logitBytes, lossBytes := roundUp(4*rows*ld, workAlign), roundUp(8*rows, workAlign)
	logits := b.work(graph.CUDATarget().Workspace(b.Program, b.Op))
	rowLoss := logits + driver.Address(logitBytes)
	scratch := rowLoss + driver.Address(lossBytes)
	sums := hasW && cut.HeadSums(n, v, b.outBuf(2).DType) // dw's fp32 sums follow the products' workspace
	sumsAt := logits + driver.Address(graph.CUDATarget().Workspace(b.Program, b.Op)-roundUp(4*v*c, workAlign))
	report := b.targets(v)
	gradLd := ld // row stride of the logits' gradients, in elements of their type
	if typ != graph.F32 {
		gradLd = 2 * ld
	}
	for r0 := int64(0); r0 < n && b.err == nil; r0 += rows {
		m := min(rows, n-r0)
		xAt := x + driver.Address(r0*c)*size

		classes := wholePacks(typ, v)
		for _, p := range classes {
			forward := linearProduct(typ, wBuf.DType, graph.F32, m, c, p.n, true)
			forward.C.Ld = ld
			b.product(forward, places(xAt, w+driver.Address(p.from*c)*size, logits+driver.Address(4*p.from), scratch, &forward))
		}
		b.rows(loss, name, m, rowThreads(v), 0,
			b.args().Pointer(logits).Int64(v).Int64(ld).Pointer(targets).Int64(r0).
				Pointer(invCount).Pointer(lossScale).Pointer(rowLoss).Pointer(report))
		b.sumLoss(rowLoss, m)
		for i, part := range classes {
			from := driver.Address(part.from)
			if hasX {
				p := gradXProduct(typ, wBuf.DType, b.outBuf(1).DType, m, c, part.n, true)
				p.A.Ld = gradLd
				p.Accumulate = i > 0
				b.product(p, places(logits+from*size, w+from*driver.Address(c)*size, b.out(1)+driver.Address(r0*c)*size, scratch, &p))
			}
			if hasW {
				to, t, accumulate := b.out(2), b.outBuf(2).DType, b.accum(2) == 1
				if sums {
					to, t, accumulate = sumsAt, graph.F32, false
				}
				p := gradWProduct(typ, typ, t, m, c, part.n, true)
				p.A.Ld = gradLd
				p.Accumulate = r0 > 0 || accumulate
				b.product(p, places(logits+from*size, xAt, to+from*driver.Address(c*t.Size()), scratch, &p))
			}
		}
	}
	if sums {
		b.over(elementwise, "cast_f32_"+b.float(b.outBuf(2)), v*c, 8, b.args().Pointer(sumsAt).Pointer(b.out(2)).Int64(v*c).Int32(b.accum(2)))
	}
}

// classRange is the range of classes [from, from+n) of a vocabulary.
type classRange struct{ from, n int64 }

// wholePacks splits a vocabulary of 16-bit elements into a multiple of 8 classes and the remainder,
// because cuBLASLt runs products with other sizes at a seventh of its rate. The remainder comes
// first, so that only its small part of the gradient of x is rounded twice.
func wholePacks(t graph.DType, v int64) []classRange {
	whole := v - v%(16/t.Size())
	if t == graph.F32 || whole == v || whole == 0 {
		return []classRange{{0, v}}
	}
	return []classRange{{whole, v - whole}, {0, whole}}
}

func places(a, b, c, work driver.Address, p *blas.Product) blas.Places {
	at := blas.Places{A: a, B: b, C: c}
	if p.Workspace > 0 {
		at.Work = work
	}
	return at
}
