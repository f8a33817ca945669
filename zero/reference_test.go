package zero

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

// Each optimizer's own kernel must match its fp64 reference, in whatever order its parts run, and
// must not change the elements between parameters.
func TestKernelsFollowTheirReference(t *testing.T) {
	for _, op := range Operations() {
		def := op.Definition()
		if def.Library {
			continue
		}
		const n = 40_000
		rng := rand.New(rand.NewPCG(1, 1))
		start := make([][]float64, len(def.In)+len(def.Out))
		for i := range start {
			start[i] = make([]float64, n)
			for k := range start[i] {
				start[i][k] = math.Abs(float64(float32(rng.NormFloat64())))
			}
		}
		call := func(wide, backward bool) *graph.Call {
			c := &graph.Call{Attr: graph.UpdateAttr{Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1},
				Params: []graph.ParamRange{{Lo: 0, Hi: 17_000, Decay: true}, {Lo: 17_152, Hi: 17_153}, {Lo: 17_408, Hi: n - 3, Decay: true}}}
			if backward {
				c.Run = func(n int, f func(i int)) {
					for i := n - 1; i >= 0; i-- {
						f(i)
					}
				}
			}
			for i, v := range start {
				x := graph.Tensor{Shape: []int64{n}}
				for _, value := range v {
					if i < len(def.In) && def.In[i].Types[0] == graph.F64 || wide {
						x.F64 = append(x.F64, value)
					} else {
						x.F32 = append(x.F32, float32(value))
					}
				}
				if i < len(def.In) {
					c.In = append(c.In, x)
				} else {
					c.Out = append(c.Out, x)
				}
			}
			return c
		}
		one, other, wide := call(false, false), call(false, true), call(true, false)
		require.NoError(t, def.CPU(one))
		require.NoError(t, def.CPU(other))
		require.NoError(t, def.Reference(wide))
		require.Equal(t, one.Out, other.Out, "%s in another order", def.Kind)
		for k := range one.Out {
			require.Equal(t, float32(start[len(def.In)+k][17_100]), one.Out[k].F32[17_100], "%s writes padding", def.Kind)
			moved := 0
			for i, v := range one.Out[k].F32 {
				require.InDelta(t, wide.Out[k].F64[i], float64(v), 1e-5*(1+math.Abs(wide.Out[k].F64[i])), "%s: %s[%d]", def.Kind, def.Out[k].Name, i)
				if float64(v) != start[len(def.In)+k][i] {
					moved++
				}
			}
			require.Greater(t, moved, n/2, "%s: %s", def.Kind, def.Out[k].Name)
		}
	}
}
