package train

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/run"
	"github.com/spillway-ml/spillway/train/saving"
)

// gradScaler applies the published rules to a run's overflows: those of torch.cuda.amp.GradScaler,
// and Config.LossScaleHysteresis for consecutive overflows.
type gradScaler struct {
	scale            float64
	clean, overflows int
	hysteresis       int
}

func (s *gradScaler) update(overflow bool) {
	if !overflow {
		s.overflows = 0
		if s.clean++; s.clean == 2000 {
			s.scale, s.clean = s.scale*2, 0
		}
		return
	}
	s.clean = 0
	if s.overflows++; s.overflows == s.hysteresis {
		s.scale, s.overflows = s.scale/2, 0
	}
}

// TestLossScaleFollowsGradScaler plants overflows on one rank at random steps. The scale must
// follow the published rules, with clipping and hysteresis, at the 2,000th clean update and after
// resumes with other numbers of ranks. A skipped step changes no parameter; other steps apply the
// clipped gradient.
func TestLossScaleFollowsGradScaler(t *testing.T) {
	t.Parallel()
	for hysteresis := 1; hysteresis <= 3; hysteresis++ {
		r := rand.New(rand.NewPCG(uint64(hysteresis), 38))
		c := tiny("gpt2")
		c.Precision, c.LossScaleHysteresis, c.Batch, c.Seq, c.Steps, c.Checkpoint = "fp16", hysteresis, 1, 8, 100, scratch(t)
		c.Optimizer, c.Beta1, c.WeightDecay, c.LR, c.Clip = "sgd", 0, 0, 0.5, 0.01
		c.Ranks, c.Zero = 2, r.IntN(3) // stages with complete values on each rank, which plantInf changes
		want := gradScaler{scale: 512, clean: 1990, hysteresis: hysteresis}
		tr := trainerAt(t, c, want.scale)
		require.NoError(t, tr.startScale(&saving.Scale{Scale: want.scale, Clean: float64(want.clean)}))
		skipped, grown, halved := 0, false, false
		for step := range 26 {
			if step == 9 || step == 17 { // after 9 clean updates, and during overflows
				_, err := tr.Save(t.Context())
				require.NoError(t, err)
				require.NoError(t, tr.Close())
				c.Ranks, c.Zero, c.Resume = 1+r.IntN(3), r.IntN(3), true
				tr, err = c.start(t.Context())
				require.NoError(t, err)
				t.Cleanup(func() { require.NoError(t, tr.Close()) })
			}
			what := fmt.Sprintf("hysteresis %d, step %d", hysteresis, step)
			require.Equal(t, want.scale, tr.at.Scale.Scale, what)
			require.EqualValues(t, want.clean-want.overflows, tr.at.Scale.Clean, what)
			overflow := step > 11 && (r.IntN(3) == 0 || step == 16 || step >= 20 && step < 23)
			if overflow {
				plantInf(t, tr, r.IntN(c.Ranks))
			}
			before := parameters(t, tr)
			got, err := tr.Step(t.Context())
			require.NoError(t, err)
			require.Equal(t, overflow, got.Skipped, what)
			require.Equal(t, want.scale, got.LossScale, what)
			moved := 0.0
			for name, after := range parameters(t, tr) {
				for i, v := range after.v {
					moved += (v - before[name].v[i]) * (v - before[name].v[i])
				}
			}
			if overflow {
				require.Zero(t, moved, what)
				require.NoError(t, tr.refresh())
				skipped++
			} else {
				require.InEpsilon(t, c.LR*c.Clip, math.Sqrt(moved), 1e-3, what)
			}
			require.Equal(t, skipped, got.SkippedAll, what)
			was := want.scale
			want.update(overflow)
			grown, halved = grown || want.scale > was, halved || want.scale < was
		}
		require.True(t, grown && halved)
		require.NoError(t, os.RemoveAll(c.Checkpoint))
	}
}

// silent is an identity operation whose gradient is zero at any loss scale.
var silentGrad = graph.MustDefine(graph.Definition{
	Kind: "test_silent_grad", In: []graph.Operand{graph.FloatIn("dy")}, Out: []graph.Operand{graph.GradOut("dx")},
	Shapes: func(_ any, in [][]int64) ([][]int64, error) { return in[:1], nil },
	CPU: func(c *graph.Call) error {
		for i := range int(c.In[0].Elems()) {
			c.Out[0].Put(i, 0)
		}
		return nil
	},
})

var silent = graph.MustDefine(graph.Definition{
	Kind: "test_silent", In: []graph.Operand{graph.FloatIn("x")}, Out: []graph.Operand{graph.FloatOut("y")},
	Shapes: func(_ any, in [][]int64) ([][]int64, error) { return in[:1], nil },
	CPU: func(c *graph.Call) error {
		for i := range int(c.In[0].Elems()) {
			c.Out[0].Put(i, c.In[0].At(i))
		}
		return nil
	},
	Derive: func(d *graph.Derivation) { d.Apply(silentGrad, "d", nil, []graph.BufID{d.Grad(0)}, 0) },
})

// TestLossScaleHasACeiling checks that a dynamic scale stays at config.MaxScale on every rank, also
// after a resume. A larger static scale is refused.
func TestLossScaleHasACeiling(t *testing.T) {
	t.Parallel()
	c := ownConfig(&config.Model{Name: "silent", Forward: func(b *graph.Builder, rows, seq int, train bool) error {
		b.Unit("all")
		x := b.Reshape("flat", b.Input("x", int64(rows), squareSide, squareSide, 1), int64(rows), squareSide*squareSide)
		x = b.Linear("head", x, b.Param("head.weight", graph.Normal(0.1), 4, squareSide*squareSide), graph.Value{}, graph.LinearAttr{TransW: true})
		b.CrossEntropy("loss", b.Apply(silent, "silent", nil, x)[0], b.Targets(int64(rows), 1))
		return nil
	}})
	c.Precision, c.Steps, c.EvalEvery, c.Own.Eval, c.Checkpoint = "fp16", 9, 0, nil, scratch(t)
	tr, err := c.start(t.Context())
	require.NoError(t, err)
	require.NoError(t, tr.startScale(&saving.Scale{Scale: config.MaxScale / 2, Clean: 1999}))
	for i, want := range []float64{config.MaxScale / 2, config.MaxScale, config.MaxScale, config.MaxScale} {
		if i == 2 { // make the scale due to grow again
			require.NoError(t, tr.startScale(&saving.Scale{Scale: config.MaxScale, Clean: 1999}))
		}
		r, err := tr.Step(t.Context())
		require.NoError(t, err)
		require.False(t, r.Skipped)
		require.Equal(t, want, r.LossScale, "step %d", i+1)
	}
	require.Equal(t, saving.Scale{Scale: config.MaxScale, Clean: 1}, tr.at.Scale)
	require.NoError(t, tr.ranks.Each("the look at the scale", func(r *run.Rank) error {
		var state [8 * graph.NumScale]byte
		err := r.Exec.Read(tr.plan.Program.Scaler.State, 0, state[:])
		if got := math.Float64frombits(binary.NativeEndian.Uint64(state[8*graph.ScaleValue:])); got != config.MaxScale {
			err = errors.Join(err, fmt.Errorf("rank %d keeps %g", r.Index, got))
		}
		return err
	}))
	_, err = tr.Save(t.Context())
	require.NoError(t, err)
	require.NoError(t, tr.Close())
	c.Resume, c.Ranks = true, 1
	tr, err = c.start(t.Context())
	require.NoError(t, err)
	require.Equal(t, saving.Scale{Scale: config.MaxScale, Clean: 1}, tr.at.Scale)
	require.NoError(t, tr.Close())

	c.LossScale = "1e39"
	require.ErrorContains(t, c.Validate(), "use dynamic or a number from 1 to 2^126")
}
