//go:build linux

package cuda

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/optest"
)

type boostAttr struct{ By float64 }

// boost is a user-defined operation with a kernel for each device.
var boost = graph.MustDefine(graph.Definition{
	Kind: "boost", Doc: "y = By·a·b, with scratch that it does not need",
	In: []graph.Operand{graph.FloatIn("a"), graph.FloatIn("b")}, Out: []graph.Operand{graph.GradOut("y")}, Attr: boostAttr{},
	Shapes: func(_ any, in [][]int64) ([][]int64, error) { return in[:1], nil },
	Work:   func(_ any, in, _ [][]int64) int64 { return 4 * in[0][0] },
	CPU: func(c *graph.Call) error {
		for i := range c.Out[0].F32 {
			v := float32(c.Attr.(boostAttr).By) * (c.In[0].F32[i] * c.In[1].F32[i])
			if c.Out[0].Accum {
				v = c.Out[0].F32[i] + v
			}
			c.Out[0].F32[i] = v
		}
		return nil
	},
	CUDA: &graph.CUDAKernel{
		Source: `KERNEL(128, boost, const int *skip, const IN0 *a, const IN1 *b, OUT0 *y, float *work, int add, i64 n, float by) {
	SKIP();
	for (i64 i = first(); i < n; i += stride()) {
		work[i] = by * (load(a + i) * load(b + i));
		store(y + i, work[i], add);
	}
}`,
		Launches: func(c *graph.Call) []graph.CUDALaunch {
			return []graph.CUDALaunch{{Kernel: "boost", Blocks: 2, Threads: 128, Args: []any{c.Out[0].Elems(), float32(c.Attr.(boostAttr).By)}}}
		},
	},
})

func TestKernelsOfAProgramsOwn(t *testing.T) {
	b := newBench(t)
	for seed := range uint64(12) {
		rng := rand.New(rand.NewPCG(seed, 12))
		shape := [][]int64{{1 + rng.Int64N(700)}}
		o := optest.OfOwn(boost, boostAttr{1.5}, append(shape, shape...), shape, rng, optest.Options{Target: target(), Half: seed%3 > 0, F16: seed%3 > 1, Aligned: seed%2 == 0})
		require.NoError(t, graph.Check(o.P, o.Op()))
		want, err := o.Interpret()
		require.NoError(t, err)
		b.compare(t, o, want, fmt.Sprintf("seed %d", seed))
	}
}

func TestKernelsOfAProgramsOwnAreRefused(t *testing.T) {
	b := newBench(t)
	for want, change := range map[string]func(d *graph.Definition){
		"the operation has no kernel for a GPU: its definition lacks CUDA": func(d *graph.Definition) { d.CUDA = nil },
		"argument 0 is int, want int32, int64, float32 or float64": func(d *graph.Definition) {
			d.CUDA = &graph.CUDAKernel{Source: boost.Definition().CUDA.Source, Launches: func(*graph.Call) []graph.CUDALaunch {
				return []graph.CUDALaunch{{Kernel: "boost", Blocks: 1, Threads: 1, Args: []any{1}}}
			}}
		},
		"1 blocks of 2000 threads": func(d *graph.Definition) {
			d.CUDA = &graph.CUDAKernel{Source: boost.Definition().CUDA.Source, Launches: func(*graph.Call) []graph.CUDALaunch {
				return []graph.CUDALaunch{{Kernel: "boost", Blocks: 1, Threads: 2000}}
			}}
		},
	} {
		d := *boost.Definition()
		change(&d)
		own, err := graph.Define(d)
		require.NoError(t, err)
		o := optest.OfOwn(own, boostAttr{1}, [][]int64{{8}, {8}}, [][]int64{{8}}, rand.New(rand.NewPCG(1, 1)), optest.Options{Target: target(), Finite: true})
		offsets, size := o.Layout(workAlign)
		a := b.newArena(t, size)
		_, err = b.lib.Bind(o.Binding(a, offsets))
		require.ErrorContains(t, err, want)
		a.free(t)
	}
}
