//go:build linux

package train

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/train/saving"
)

// geluTiny returns tiny gpt2 in 16 bits with GELU in the epilogues of the matrix products.
func geluTiny(precision string) request {
	c := tiny("gpt2")
	c.Device, c.Precision, c.Epilogues = "cuda", precision, []string{"gelu", "dgelu"}
	c.Steps, c.Batch, c.Seq, c.Clip, c.Dropout = 2, 1, 16, 1, 0.1
	c.EvalData, c.EvalEvery, c.EvalSteps = c.Data, 1, 2
	return c
}

// TestGELUEpilogueIsChosen checks that each GELU after a product becomes one operation with it, in
// training and evaluation. Selective recomputation must not recompute any GELU separately.
func TestGELUEpilogueIsChosen(t *testing.T) {
	t.Parallel()
	planned := func(recompute string, names ...string) map[graph.Kind]int {
		c := onGPU(names...)
		c.Recompute, c.EvalData, c.EvalEvery = recompute, c.Data, 1
		return kindsOf(t, c)
	}
	without, with := planned("none"), planned("none", "GELU", "dgelu")
	require.Zero(t, without[graph.LinearAct])
	require.Positive(t, with[graph.LinearAct])
	require.Equal(t, without[graph.Linear], with[graph.Linear]+with[graph.LinearAct])
	require.Equal(t, without[graph.LinearGradAct], with[graph.LinearGradAct])
	require.Equal(t, with[graph.LinearAct], planned("none", "all")[graph.LinearAct])
	selective := planned("selective", "dgelu", "gelu")
	require.Equal(t, with[graph.LinearAct], selective[graph.LinearAct])
	require.Zero(t, selective[graph.Activation])
	require.Positive(t, planned("selective")[graph.Activation])
	require.Greater(t, planned("full", "gelu")[graph.LinearAct], with[graph.LinearAct])

	both := onGPU("gelu", "dgelu")
	require.Equal(t, "dgelu,gelu", saving.Settings(&both.Config)["epilogues"])
	require.Equal(t, "gelu", (&planner.Forecast{Config: onGPU("gelu").Config}).Epilogues())
}

// evaluated is the outcome of a run and its evaluations.
type evaluated struct {
	outcome
	evals []string
}

// geluOnDouble runs c on a double that must find no error (see runOnDouble). In every memory space
// the touched peak must equal the planned peak.
func geluOnDouble(t *testing.T, c request, seed uint64, gpuKernels bool) (o evaluated) {
	t.Helper()
	d := onDouble(t, &c, drivertest.Options{Seed: seed}, gpuKernels)
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
		o.losses = append(o.losses, r.Loss)
		require.NotNil(t, r.Eval)
		o.evals = append(o.evals, fmt.Sprint(r.Eval.Loss, r.Eval.Targets))
		for sp := range graph.NumSpaces {
			require.Equal(t, r.Planned[sp], r.Peak[sp], "touched %s peak = plan, step %d", sp, r.Step)
		}
		return nil
	}))
	o.sha, err = tr.ParamsSHA256()
	require.NoError(t, err)
	require.NoError(t, tr.Close())
	require.NoError(t, d.Close())
	return o
}

// TestCUDAGELUEpilogueGivesTheSameBits varies stage, recomputation, placement and prefetch with
// GELU in the epilogue. At one number of ranks the bits must be the same, evaluation losses
// included. Without the epilogue the losses differ slightly.
func TestCUDAGELUEpilogueGivesTheSameBits(t *testing.T) {
	t.Parallel()
	recomputes := []string{"none", "full", "selective", "drop:h.*.mlp.act", "drop:h.0.mlp.c_fc", "full:h.1;selective:h.0"}
	turn := 0
	for p, precision := range []string{"bf16", "fp16"} {
		for _, ranks := range inTurn(p, []int{3, 1}) {
			c := geluTiny(precision)
			c.Ranks, c.Zero = ranks, 0
			want := geluOnDouble(t, c, 0, false)
			separate := c
			separate.Epilogues = []string{"none"}
			other := geluOnDouble(t, separate, 0, false)
			require.NotEqual(t, want.losses, other.losses, "another rounding")
			for s := range want.losses {
				require.InEpsilon(t, other.losses[s], want.losses[s], 5e-3)
			}
			for i, placement := range append([]string{""}, placements...) {
				if !long.On() && i%4 != p { // a quarter of the placements with each precision
					continue
				}
				one := c
				one.Zero, one.Prefetch, one.Offload, one.Disk = turn%4, turn/len(recomputes)%3, placement, t.TempDir()
				one.Recompute = recomputes[turn%len(recomputes)]
				at := fmt.Sprintf("%s, %d ranks, stage %d, prefetch %d, recompute %s, %s", precision, ranks, one.Zero, one.Prefetch, one.Recompute, placement)
				got := geluOnDouble(t, one, uint64(turn%3), false)
				require.Equal(t, want, got, at)
				turn++
			}
		}
	}
}

// TestCUDAGELUEpilogueIsOneCurve checks that reproducible runs give the same bits at 1, 2 and 4
// ranks with the same number of micro-batches.
func TestCUDAGELUEpilogueIsOneCurve(t *testing.T) {
	var want evaluated
	for i, ranks := range []int{1, 2, 4} {
		c := geluTiny("bf16")
		c.Ranks, c.Accum, c.Reproducible, c.Zero = ranks, 4/ranks, true, 3-i
		c.Recompute = []string{"full", "none", "selective"}[i]
		got := geluOnDouble(t, c, uint64(i), false)
		if i == 0 {
			want = got
		}
		require.Equal(t, want.losses, got.losses, "%d ranks", ranks)
		require.Equal(t, want.sha, got.sha, "%d ranks", ranks)
	}
}

// TestCUDAGELUEpilogueOfOtherRuns checks that stage and recomputation change no bit in other runs.
// These have frozen layers with and without their cache, layer-order accumulation, or GELU without
// its derivative.
func TestCUDAGELUEpilogueOfOtherRuns(t *testing.T) {
	for name, change := range map[string]func(c *request){
		"frozen": func(c *request) { c.Freeze = []string{"wte*", "wpe*", "h.0.*"} },
		"cached": func(c *request) {
			c.Freeze, c.FrozenCache = []string{"wte*", "wpe*", "h.0.*"}, config.FrozenCache{Tier: graph.Host, Bytes: 1 << 20}
		},
		"accumulate": func(c *request) { c.Accum, c.AccumOrder = 2, "layer" },
		"gelu alone": func(c *request) { c.Epilogues = []string{"gelu"} },
	} {
		c := geluTiny("bf16")
		c.Ranks, c.Dropout = 2, 0
		change(&c)
		var want *evaluated
		for i, recompute := range []string{"none", "full"} {
			one := c
			one.Zero, one.Recompute = 2+i, recompute
			got := geluOnDouble(t, one, 5, false)
			if want == nil {
				want = &got
			}
			require.Equal(t, *want, got, name)
		}
	}
}

// TestCUDAGELUEpilogueByTheGPUsKernels runs the GPU's kernels with the double of cuBLASLt. The bits
// must be the same at every stage, recomputation and placement, and near those of the CPU kernels.
func TestCUDAGELUEpilogueByTheGPUsKernels(t *testing.T) {
	c := geluTiny("bf16")
	c.Ranks, c.Seq, c.Dropout, c.Steps = 2, 8, 0, 1 // these kernels are slow on the double
	near := geluOnDouble(t, c, 0, false)
	var want *evaluated
	for zero, placement := range []string{"", "optimizer=host", "activations=host", "optimizer=disk,parameters=host"} {
		one := c
		one.Zero, one.Offload, one.Disk, one.Recompute = zero, placement, t.TempDir(), []string{"none", "full", "selective", "drop:h.*.mlp.act"}[zero]
		got := geluOnDouble(t, one, uint64(zero), true)
		if want == nil {
			want = &got
			require.InEpsilon(t, near.losses[0], got.losses[0], 5e-3)
		}
		require.Equal(t, *want, got, "stage %d", zero)
	}
}
