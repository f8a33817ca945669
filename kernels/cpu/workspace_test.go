package cpu

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/attn"
	"github.com/spillway-ml/spillway/kernels/cpu/gemm"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// workspace returns an operation's scratch in bytes, computed by the kernels. It is the reference
// for graph.CPUTarget's Workspace, which does not import kernels.
func workspace(p *graph.Program, op *graph.Op) int64 {
	shape := func(id graph.BufID) (rows, cols int) {
		b := p.Buf(id)
		cols = int(b.Shape[len(b.Shape)-1])
		return int(b.Elems()) / cols, cols
	}
	switch op.Kind {
	case graph.LinearAct:
		s := linearSpec(p, op)
		if s.Out == gemm.F32 {
			return aligned(gemm.Workspace(s))
		}
		s.Out = gemm.F32
		return aligned(gemm.Workspace(s)) + aligned(4*p.Buf(op.Out[0].Buf).Elems())
	case graph.Linear, graph.LinearGradX, graph.LinearGradAct, graph.LinearGradW, graph.LinearGradWB:
		if op.Attr.(graph.LinearAttr).Int8 {
			return int8Workspace(linearSpec(p, op))
		}
		return aligned(gemm.Workspace(linearSpec(p, op)))
	case graph.RMSNorm, graph.RMSNormGrad:
		gamma := p.Buf(op.In[len(op.In)/2]) // of x, gamma; of dy, x, gamma, rstd
		if op.Attr.(graph.NormAttr).PlusOne && halves[gamma.DType] == vec.NoHalf {
			return aligned(4 * gamma.Elems())
		}
	case graph.Attention:
		return aligned(4 * int64(attn.ForwardWorkspace(attnShape(op.Attr.(graph.AttentionAttr)))))
	case graph.AttentionCached:
		return aligned(4 * int64(attn.ForwardWorkspace(cachedShape(p, op))))
	case graph.AttentionGrad:
		if halves[p.Buf(op.In[0]).DType] != vec.NoHalf {
			return aligned(4 * int64(attn.BackwardWorkspace16(attnShape(op.Attr.(graph.AttentionAttr)))))
		}
		return aligned(4 * int64(attn.BackwardWorkspace(attnShape(op.Attr.(graph.AttentionAttr)))))
	case graph.EmbedGrad: // for a 16-bit gradient, the rows sorted by token
		if halves[p.Buf(op.In[1]).DType] != vec.NoHalf {
			return aligned(8 * p.Buf(op.In[0]).Elems())
		}
	case graph.Rope, graph.RopeAt:
		a := op.Attr.(graph.RopeAttr)
		return aligned(4 * a.Seq * a.HeadDim)
	case graph.Sum:
		return aligned(8 * int64(vec.SumWork(int(p.Buf(op.In[0]).Elems()))))
	case graph.NewtonSchulz:
		r, c := shape(op.In[0])
		return newtonSchulzWork(r, c)
	case graph.HeadLoss, graph.HeadLossGrad, graph.HeadStats, graph.HeadSliceGrad:
		n, c := shape(op.In[0])
		v, _ := shape(op.In[1])
		rows := headRowsOf(p, op)
		t, dw, sum := gemmTypes[p.Buf(op.In[0]).DType], gemm.F32, int64(0)
		dxBuf, dwBuf := graph.HeadGradients(op)
		if dwBuf != graph.NoBuf {
			var inWork bool
			if dw, inWork = headSum(p.Buf(dwBuf).DType, n > rows); inWork {
				sum = aligned(4 * int64(v) * int64(c))
			}
		}
		forward, gradX, gradW := headSpecs(rows, c, v, t, dw, false)
		product := gemm.Workspace(forward) // a last, smaller chunk needs no more
		if dxBuf != graph.NoBuf {
			product = max(product, gemm.Workspace(gradX))
		}
		if dwBuf != graph.NoBuf {
			product = max(product, gemm.Workspace(gradW))
		}
		return aligned(4*int64(rows)*int64(v)) + aligned(4*int64(rows)) + aligned(8*int64(rows)) + sum + aligned(product)
	}
	return 0
}

// int8Workspace returns the scratch of an int8 product: codes and scales of both factors, and that
// of the product itself.
func int8Workspace(s gemm.Spec) int64 {
	m, n, k := int64(s.M), int64(s.N), int64(s.K)
	return aligned(m*k) + aligned(k*n) + aligned(4*m) + aligned(4*n) + aligned(gemm.Workspace(s))
}

func newtonSchulzWork(rows, cols int) int64 {
	gram, square, apply := newtonSchulzSpecs(rows, cols)
	k, n := int64(min(rows, cols)), int64(rows)*int64(cols)
	return 2*aligned(4*k*k) + aligned(4*n) + aligned(4*int64(cols)) +
		aligned(max(gemm.Workspace(gram), gemm.Workspace(square), gemm.Workspace(apply)))
}
