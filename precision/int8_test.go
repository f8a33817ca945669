package precision_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
	"github.com/spillway-ml/spillway/zero"
)

var int8Switches = map[string]func(c *plan.Config){
	"gather":      func(c *plan.Config) { c.Int8Gather = true },
	"reduce":      func(c *plan.Config) { c.Int8Reduce = true },
	"activations": func(c *plan.Config) { c.Int8.Activations = true },
	"matmul":      func(c *plan.Config) { c.Int8.Matmul = true },
	"all": func(c *plan.Config) {
		c.Int8Gather, c.Int8Reduce, c.Int8 = true, true, precision.Int8{Activations: true, Matmul: true}
	},
}

// For each int8 setting, every stage and recomputation policy gives the same losses and parameters.
// The losses stay close to those without int8, but are not equal to them.
func TestInt8StagesAgree(t *testing.T) {
	const scale = 1
	plain := start(t, config(3, 0, zero.Replicate, precision.BF16))
	want := plain.losses(scale)
	for name, set := range int8Switches {
		var first []float64
		var params [][]float32
		for i, again := range []string{"none", "full", "selective", "full"} {
			c := config(3, 0, zero.Stage(i), precision.BF16)
			var err error
			c.Recompute, err = recompute.Parse(again)
			require.NoError(t, err)
			set(&c)
			r := start(t, c)
			got := r.losses(scale)
			if i == 0 {
				first, params = got, r.values()
			}
			require.Equal(t, first, got, "%s, stage %d, recompute %s", name, i, again)
			require.Equal(t, params, r.values(), "%s, stage %d, recompute %s", name, i, again)
			r.copiesFollowMasters(name)
		}
		require.NotEqual(t, want, first, name)
		for s := range want {
			require.InEpsilon(t, want[s], first[s], 1e-2, "%s, step %d", name, s+1)
		}
	}
}

// If a gradient is not finite on one rank, all ranks skip the step, even if a quantised sum carries
// it. Parameters, masters and moments do not change, and the next step trains.
func TestInt8OverflowSkipsTheStep(t *testing.T) {
	for stage := range zero.Stage(4) {
		c := config(4, []int{0, 2}[stage%2], stage, precision.FP16)
		int8Switches["all"](&c)
		r := start(t, c)
		r.next(1024)
		values, resident, states := r.values(), r.resident(), r.states()
		r.next(1e30)
		for rank := range r.w.Ranks() {
			require.Equal(t, []float64{graph.InitialLossScale / 2, 0}, r.f64(rank, r.p.Port(graph.PortScale)))
		}
		require.Equal(t, values, r.values())
		require.Equal(t, resident, r.resident())
		require.Equal(t, states, r.states())
		r.next(1024)
		require.NotEqual(t, values, r.values())
	}
}

// gradients returns the gradients that the first step's update reads, by parameter.
func gradients(t *testing.T, set func(c *plan.Config)) [][]float64 {
	c := config(1, 0, zero.Replicate, precision.BF16)
	set(&c)
	r := start(t, c)
	r.next(1)
	var all [][]float64
	for i := range r.p.Params {
		v := make([]float64, r.p.Params[i].Elems())
		u := &r.p.Units[r.p.Params[i].Unit]
		g, err := r.w.U16(0, u.Grad.Update)
		require.NoError(t, err)
		for _, s := range u.Segments {
			for k := range s.Len {
				if s.Param == i {
					v[s.Start+k] = float64(math.Float32frombits(uint32(g[s.Flat+k]) << 16))
				}
			}
		}
		all = append(all, v)
	}
	return all
}

// For each parameter, the gradients with int8 have a cosine of more than 0.99 with those of bf16.
// Key biases are left out: their true gradient is zero.
func TestInt8GradientsWithinQuantisation(t *testing.T) {
	want := gradients(t, func(*plan.Config) {})
	for _, name := range []string{"gather", "activations", "matmul"} {
		got := gradients(t, int8Switches[name])
		for i := range want {
			var dot, a, b float64
			for k := range want[i] {
				if n := len(want[i]) / 3; len(want[i]) == 48 && k >= n && k < 2*n {
					continue // the key part of c_attn's bias
				}
				dot, a, b = dot+want[i][k]*got[i][k], a+want[i][k]*want[i][k], b+got[i][k]*got[i][k]
			}
			require.Greater(t, dot/math.Sqrt(a*b), 0.99, "%s, parameter %d of %d elements", name, i, len(want[i]))
		}
	}
}
