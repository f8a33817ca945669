package zero

import (
	"math"
	"sort"

	"github.com/spillway-ml/spillway/graph"
)

// Adagrad divides by the square root of the sum of all squared gradients so far.
var _ = register(&Rule{
	Name: "adagrad", States: []string{"sum"}, Reads: []Constant{Eps},
	Source: "Duchi, Hazan and Singer, Adaptive Subgradient Methods for Online Learning and Stochastic Optimization, JMLR 2011",
	Emit: func(e *Emitter, t *Target) {
		e.ApplyOwn(t, adagrad, e.Scalars(t), InPlace(t.Value, t.States[0]))
	},
}, adagrad)

var adagrad = graph.MustDefine(graph.Definition{
	Kind: "adagrad",
	Doc:  "With d = coef·g + Decay·p: sum += d², p −= lr·d/(√sum + Eps); g, p, sum (Len).",
	In:   graph.UpdateIn(), Out: []graph.Operand{graph.StateOut("p"), graph.StateOut("sum"), graph.LowOut()},
	Attr:  graph.UpdateAttr{},
	Flops: func(_ any, in, _ [][]int64) int64 { return 8 * in[0][0] },
	CPU: func(c *graph.Call) error {
		a, lr, coef := c.Attr.(graph.UpdateAttr), float32(c.In[2].F64[graph.HyperLR]), c.In[1].F32[0]
		g, p, sum, low := c.In[0].F32, c.Out[0].F32, c.Out[1].F32, c.Out[2].F32
		eachChunk(c, func(r graph.ParamRange) {
			decay := float32(0)
			if r.Decay {
				decay = float32(a.Decay)
			}
			for i := r.Lo; i < r.Hi; i++ {
				// The conversions prevent fused multiply-adds, which would change bits.
				d := float32(coef*g[i]) + float32(decay*p[i])
				sum[i] += float32(d * d)
				p[i] -= float32(lr * d / (float32(math.Sqrt(float64(sum[i]))) + float32(a.Eps)))
				if low != nil {
					low[i] = p[i]
				}
			}
		})
		return nil
	},
	Reference: func(c *graph.Call) error {
		a, lr, coef := c.Attr.(graph.UpdateAttr), c.In[2].F64[graph.HyperLR], c.In[1].F64[0]
		g, p, sum := c.In[0].F64, c.Out[0].F64, c.Out[1].F64
		for _, r := range c.Params {
			for i := r.Lo; i < r.Hi; i++ {
				d := coef * g[i]
				if r.Decay {
					d += a.Decay * p[i]
				}
				sum[i] += d * d
				p[i] -= lr * d / (math.Sqrt(sum[i]) + a.Eps)
				if low := c.Out[2].F64; low != nil {
					low[i] = p[i]
				}
			}
		}
		return nil
	},
})

// eachChunk calls f, in parallel, for chunks of the parameters' ranges.
func eachChunk(c *graph.Call, f func(r graph.ParamRange)) {
	const size = 1 << 14
	n := len(c.Out[0].F32)
	c.Parallel((n+size-1)/size, func(k int) {
		lo, hi := k*size, min((k+1)*size, n)
		first := sort.Search(len(c.Params), func(i int) bool { return c.Params[i].Hi > lo })
		for _, r := range c.Params[first:] {
			if r.Lo >= hi {
				return
			}
			start := max(r.Lo, lo)
			r.First += int64(start - r.Lo)
			r.Lo, r.Hi = start, min(r.Hi, hi)
			f(r)
		}
	})
}
