package train

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/run"
	"github.com/spillway-ml/spillway/train/saving"
)

// TestHalfLossesFollowPyTorch checks that losses of 16-bit runs are within 0.5 % of PyTorch's in
// fp32 over twenty steps.
func TestHalfLossesFollowPyTorch(t *testing.T) {
	t.Parallel()
	for i, want := range readReference(t).Cases {
		if !long.On() && alternate(i) {
			continue
		}
		for _, precision := range inTurn(i/2+i/8, []string{"bf16", "fp16"}) { // each at every stage
			t.Run(fmt.Sprintf("%s/%s/%d ranks/accum %d/clip %g", precision, want.Model, want.Ranks, want.Accum, want.Clip), func(t *testing.T) {
				c := tiny(want.Model)
				c.Ranks, c.Accum, c.Clip, c.Precision = want.Ranks, want.Accum, want.Clip, precision
				c.Zero = i / 2 % 4
				if precision == "fp16" {
					c.LossScale = "1024" // a dynamic scale may skip the first steps, and would then follow later losses
				}
				got := runOf(t, c)
				require.Len(t, got.losses, len(want.Losses))
				for s := range want.Losses {
					require.InEpsilon(t, want.Losses[s], float64(got.losses[s]), 5e-3, "step %d", s+1)
				}
			})
		}
	}
}

// TestBF16FollowsPyTorchsBF16 checks that bf16 losses are within 0.5 % of PyTorch's, under bf16
// autocast and in fp32. It runs fifty steps from the same weights and tokens.
func TestBF16FollowsPyTorchsBF16(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("../testdata/bf16.json")
	require.NoError(t, err)
	var reference struct {
		Cases []struct {
			Model      string
			BF16, FP32 []float64
		}
	}
	require.NoError(t, json.Unmarshal(b, &reference))
	require.Len(t, reference.Cases, 3)
	for _, want := range reference.Cases {
		c := tiny(want.Model)
		c.Ranks, c.Precision, c.Steps = 1, "bf16", 50
		got := runOf(t, c).losses
		require.Len(t, got, 50)
		require.Len(t, want.BF16, 50)
		for s, loss := range got {
			require.InEpsilon(t, want.BF16[s], float64(loss), 5e-3, "%s, step %d, bf16", want.Model, s+1)
			require.InEpsilon(t, want.FP32[s], float64(loss), 5e-3, "%s, step %d, fp32", want.Model, s+1)
		}
	}
}

// TestHalfGradientsPointWhereFP32Does compares the first step's 16-bit gradients with those of
// fp32, which follow PyTorch's. Each parameter's cosine must be at least 0.999. Key biases are
// excluded because their true gradient is zero. The gradients are measured with a step of plain SGD
// whose rate is large compared with the weights.
func TestHalfGradientsPointWhereFP32Does(t *testing.T) {
	t.Parallel()
	for _, model := range []string{"gpt2", "llama-tied", "llama-untied"} {
		gradients := func(precision string) map[string][]float32 {
			c := tiny(model)
			c.Ranks, c.Steps, c.Precision, c.Optimizer, c.LR, c.Beta1, c.WeightDecay, c.LossScale = 1, 1, precision, "sgd", 1<<20, 0, 0, ""
			if precision == "fp16" {
				c.LossScale = "1024"
			}
			tr, err := c.start(t.Context())
			require.NoError(t, err)
			defer func() { require.NoError(t, tr.Close()) }()
			_, err = tr.Step(t.Context())
			require.NoError(t, err)
			all := map[string][]float32{}
			for i := range tr.plan.Program.Params {
				name := tr.plan.Program.Params[i].Name
				_, all[name], err = tr.Parameter(name)
				require.NoError(t, err)
			}
			return all
		}
		want := gradients("fp32")
		for _, precision := range []string{"bf16", "fp16"} {
			got := gradients(precision)
			for name, w := range want {
				var dot, a, b float64
				for i, v := range w {
					if third := len(w) / 3; strings.HasSuffix(name, "c_attn.bias") && i >= third && i < 2*third {
						continue
					}
					g := float64(got[name][i])
					dot, a, b = dot+float64(v)*g, a+float64(v)*float64(v), b+g*g
				}
				require.GreaterOrEqual(t, dot/math.Sqrt(a*b), 0.999, "%s, %s, %s", model, precision, name)
			}
		}
	}
}

// TestHalfBitsDoNotDependOnTheConfiguration checks for 16-bit types that stages, recomputation,
// placements, prefetch distances and threads change no bit. By default half of the changes run.
func TestHalfBitsDoNotDependOnTheConfiguration(t *testing.T) {
	t.Parallel()
	for _, precision := range []string{"bf16", "fp16"} {
		for _, model := range []string{"gpt2", "llama-untied"} {
			c := tiny(model)
			c.Ranks, c.Steps, c.Clip, c.Precision, c.Zero = 3, 3, 1, precision, 0
			want := runOf(t, c)
			for i, change := range []func(*request){
				func(c *request) { c.Zero = 1 },
				func(c *request) { c.Zero, c.Prefetch = 2, 0 },
				func(c *request) { c.Zero, c.Threads = 3, 1 },
				func(c *request) { c.Zero, c.Recompute = 0, "full" },
				func(c *request) { c.Zero, c.Recompute = 3, "selective" },
				func(c *request) {
					c.Zero, c.Offload = 3, "optimizer=host,gradients=host,parameters=host,activations=host"
				},
				func(c *request) { c.Zero, c.Offload, c.Recompute = 1, "optimizer=host,activations=host", "full" },
				func(c *request) { c.Zero, c.Offload = 3, "optimizer=host" }, // skipped updates leave the shards unchanged
			} {
				at := fmt.Sprintf("%s, %s, change %d", precision, model, i)
				if !long.Keep(at, 2) {
					continue
				}
				d := c
				change(&d)
				got := runOf(t, d)
				require.Equal(t, want.losses, got.losses, at)
				require.Equal(t, want.sha, got.sha, at)
			}
		}
	}
}

// TestHalfAccumulationAgreesWithinItsHalves checks that with accumulation the stages agree as in
// fp32: 0 with 1, 2 with 3, and all if reproducible.
func TestHalfAccumulationAgreesWithinItsHalves(t *testing.T) {
	t.Parallel()
	for _, precision := range []string{"bf16", "fp16"} {
		c := tiny("gpt2")
		c.Ranks, c.Accum, c.Steps, c.Precision = 2, 3, 2, precision
		var plain, reproducible [4]outcome
		for z := range 4 {
			c.Zero, c.Reproducible = z, false
			plain[z] = runOf(t, c)
			c.Reproducible = true
			reproducible[z] = runOf(t, c)
		}
		require.Equal(t, plain[0].sha, plain[1].sha)
		require.Equal(t, plain[2].sha, plain[3].sha)
		for z := range 4 {
			require.Equal(t, reproducible[0].sha, reproducible[z].sha, "%s, stage %d", precision, z)
		}
	}
}

// TestHalfRunResumes checks that a checkpoint holds the master weights and the loss scale. A run
// resumed at another stage must give the bits of an uninterrupted run.
func TestHalfRunResumes(t *testing.T) {
	t.Parallel()
	for _, precision := range []string{"bf16", "fp16"} {
		c := tiny("gpt2")
		c.Ranks, c.Steps, c.Precision, c.Zero = 2, 6, precision, 3
		want := runOf(t, c)
		c.Checkpoint, c.Steps, c.Zero = t.TempDir(), 3, 0
		first := runOf(t, c)
		require.Equal(t, want.losses[:3], first.losses)
		c.Resume, c.Steps, c.Zero, c.Offload = true, 6, 2, "optimizer=host"
		rest := runOf(t, c)
		require.Equal(t, want.losses[3:], rest.losses, precision)
		require.Equal(t, want.sha, rest.sha, precision)
	}
}

// TestHalfFrozenParameters checks that frozen parameters are stored in 16 bits without a master
// copy.
func TestHalfFrozenParameters(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Steps, c.Precision, c.Freeze = 2, 2, "bf16", []string{"wte.*", "wpe.*", "h.0.*"}
	want := runOf(t, c)
	for z := range 3 {
		c.Zero = z
		require.Equal(t, want.sha, runOf(t, c).sha, "stage %d", z)
	}
	tr, err := c.start(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	_, v, err := tr.Parameter("wpe.weight")
	require.NoError(t, err)
	for _, x := range v {
		require.Zero(t, math.Float32bits(x)&0xffff, "rounded to bf16")
	}
}

// trainerAt starts an fp16 run with the given loss scale.
func trainerAt(t *testing.T, c request, scale float64) *Trainer {
	tr, err := c.start(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, tr.Close()) })
	require.NoError(t, tr.startScale(&saving.Scale{Scale: scale}))
	return tr
}

// TestOverflowHalvesTheScale checks that a step that overflows only halves the scale, until
// gradients are finite. Bias corrections must count updates only.
func TestOverflowHalvesTheScale(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Steps, c.Precision, c.Zero = 2, 40, "fp16", 3
	tr := trainerAt(t, c, 1<<40)
	before, err := tr.ParamsSHA256()
	require.NoError(t, err)
	scale, skipped := float64(1<<40), 0
	for {
		r, err := tr.Step(t.Context())
		require.NoError(t, err)
		require.Equal(t, scale, r.LossScale)
		require.Equal(t, float32(r.Loss), r.Loss)
		require.False(t, math.IsNaN(float64(r.Loss)))
		after, err := tr.ParamsSHA256()
		require.NoError(t, err)
		if !r.Skipped {
			require.NotEqual(t, before, after)
			require.Equal(t, skipped, r.SkippedAll)
			break
		}
		require.Equal(t, before, after, "a skipped step changes no parameter")
		scale, skipped = scale/2, skipped+1
		require.Equal(t, skipped, r.SkippedAll)
	}
	require.Greater(t, skipped, 5)
	h := tr.hyper(tr.at.Step, 1, 1)
	require.InDelta(t, 1-c.Beta1*c.Beta1, h[graph.HyperBC1], 1e-12, "one update so far")

	// From this scale the run continues as one without the skipped steps, except that its data
	// position is later.
	require.Equal(t, saving.Scale{Scale: scale, Clean: 1}, tr.at.Scale)
}

// plantInf sets an element of a rank's 16-bit copy of a parameter to infinity.
func plantInf(t *testing.T, tr *Trainer, rank int) {
	p := tr.plan.Program
	require.NoError(t, tr.ranks.Each("the plant", func(r *run.Rank) error {
		if r.Index != rank {
			return nil
		}
		return r.Exec.Write(p.Params[len(p.Params)-1].Value, 0, binary.NativeEndian.AppendUint16(nil, 0x7c00))
	}))
}

// TestOverflowOnOneRankSkipsOnAll checks that an overflow on one rank makes all ranks skip the
// step, and that training continues afterwards.
func TestOverflowOnOneRankSkipsOnAll(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Steps, c.Precision, c.Zero = 3, 40, "fp16", 0
	tr := trainerAt(t, c, 1<<10)
	step := func() StepResult {
		r, err := tr.Step(t.Context())
		require.NoError(t, err)
		return r
	}
	require.False(t, step().Skipped)
	before, err := tr.ParamsSHA256()
	require.NoError(t, err)
	plantInf(t, tr, 1)
	r := step()
	require.True(t, r.Skipped)
	after, err := tr.ParamsSHA256()
	require.NoError(t, err)
	require.Equal(t, before, after)
	require.NoError(t, tr.refresh())
	r = step()
	require.False(t, r.Skipped)
	require.Equal(t, float64(1<<9), r.LossScale)
	require.Equal(t, 1, r.SkippedAll)
}

// TestOverflowForGoodStopsAtTheFloor plants a permanent infinity. The scale must fall to its floor,
// where the run stops and names the tensor and rank. The checkpoint before must stay intact.
func TestOverflowForGoodStopsAtTheFloor(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Steps, c.Precision, c.Zero, c.Checkpoint = 2, 40, "fp16", 0, t.TempDir()
	tr := trainerAt(t, c, 4)
	_, err := tr.Step(t.Context())
	require.NoError(t, err)
	_, err = tr.Save(context.Background())
	require.NoError(t, err)
	plantInf(t, tr, 1)
	for range 2 { // at scales 4 and 2
		r, err := tr.Step(t.Context())
		require.NoError(t, err)
		require.True(t, r.Skipped)
	}
	_, err = tr.Step(t.Context())
	var stop *Diverged
	require.True(t, errors.As(err, &stop), "%v", err)
	require.Equal(t, 1.0, stop.LossScale)
	require.Equal(t, 1, stop.Rank)
	require.NotEmpty(t, stop.Tensor)
	require.ErrorContains(t, err, "overflowed at a loss scale of 1")
	_, err = tr.Step(context.Background())
	require.Error(t, err, "nothing runs after it")
	require.NoError(t, tr.Close()) // Close reports the error again

	c.Resume, c.Steps = true, 2
	require.Len(t, runOf(t, c).losses, 1)
}

// TestLossScaleHysteresis checks that only the configured number of consecutive overflows halves
// the scale. At the floor, that number ends the run.
func TestLossScaleHysteresis(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Steps, c.Precision, c.LossScaleHysteresis = 2, 12, "fp16", 3
	tr := trainerAt(t, c, 1<<40)
	for step := range 7 {
		r, err := tr.Step(t.Context())
		require.NoError(t, err)
		require.True(t, r.Skipped)
		require.Equal(t, math.Exp2(float64(40-step/3)), r.LossScale)
	}

	c.Zero = 0 // complete values on each rank, which plantInf changes
	tr = trainerAt(t, c, 1)
	plantInf(t, tr, 1)
	for range 2 {
		r, err := tr.Step(t.Context())
		require.NoError(t, err)
		require.True(t, r.Skipped)
	}
	_, err := tr.Step(t.Context())
	require.ErrorContains(t, err, "overflowed at a loss scale of 1")
}

// TestStaticLossScale checks that a static scale never changes, and that a resumed run uses the
// configured scale instead of the checkpoint's. A run that overflows at every step must stop.
func TestStaticLossScale(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Steps, c.Precision, c.LossScale, c.Checkpoint = 2, 3, "fp16", "128", scratch(t)
	tr, err := c.start(t.Context())
	require.NoError(t, err)
	for range 3 {
		r, err := tr.Step(t.Context())
		require.NoError(t, err)
		require.Equal(t, 128.0, r.LossScale)
		require.False(t, r.Skipped)
	}
	_, err = tr.Save(t.Context())
	require.NoError(t, err)
	require.NoError(t, tr.Close())

	c.LossScale, c.Steps, c.Resume = "1e30", 40, true
	tr, err = c.start(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	for range config.MaxSkips - 1 {
		r, err := tr.Step(t.Context())
		require.NoError(t, err)
		require.True(t, r.Skipped)
		require.Equal(t, 1e30, r.LossScale)
	}
	_, err = tr.Step(t.Context())
	require.ErrorContains(t, err, "gradient")
	require.ErrorContains(t, err, "loss scale of 1e+30")
}

func TestLossScaleIsValidated(t *testing.T) {
	t.Parallel()
	for _, bad := range []struct{ precision, scale, want string }{
		{"fp16", "0", "dynamic or a number"}, {"fp16", "much", "dynamic or a number"}, {"fp16", "NaN", "dynamic or a number"}, {"fp16", "inf", "dynamic or a number"},
		{"bf16", "128", "Config.Precision fp16"}, {"fp32", "128", "Config.Precision fp16"},
	} {
		c := tiny("gpt2")
		c.Precision, c.LossScale = bad.precision, bad.scale
		require.ErrorContains(t, c.Validate(), bad.want, "%+v", bad)
		require.ErrorContains(t, c.Validate(), "Config.LossScale")
	}
	for n, want := range map[int]string{-1: "use 1 to 10", 11: "use 1 to 10", 2: "only a dynamic loss scale"} {
		c := tiny("gpt2")
		c.LossScaleHysteresis = n
		require.ErrorContains(t, c.Validate(), want)
	}
}

// TestInt8OptimizerKeepsPromise1 checks AdamW with 8-bit moments. The bits must be the same at
// every stage, with recomputation, and through checkpoints, in memory and on disk. They must differ
// from those with f32 moments.
func TestInt8OptimizerKeepsPromise1(t *testing.T) {
	t.Parallel()
	for _, precision := range []string{"fp32", "bf16"} {
		c := tiny("gpt2")
		c.Ranks, c.Steps, c.Clip, c.Precision, c.Zero = 3, 4, 1, precision, 0
		plain := runOf(t, c)
		c.Int8 = []string{"optimizer"}
		want := runOf(t, c)
		require.NotEqual(t, plain.sha, want.sha)
		require.InEpsilon(t, plain.losses[3], want.losses[3], 5e-3)
		for z := 1; z < 4; z++ {
			d := c
			d.Zero, d.Recompute, d.Offload = z, []string{"", "none", "full", "selective"}[z], []string{"", "", "activations=host", ""}[z]
			require.Equal(t, want.sha, runOf(t, d).sha, "%s, stage %d", precision, z)
		}
		d := c
		d.Checkpoint, d.Steps, d.Zero = t.TempDir(), 2, 3
		runOf(t, d)
		d.Resume, d.Steps, d.Zero, d.Offload, d.Disk = true, 3, 2, "optimizer=disk", t.TempDir()
		runOf(t, d)
		d.Steps, d.Zero, d.Offload = 4, 1, ""
		require.Equal(t, want.sha, runOf(t, d).sha, "%s, resumed on disk and from it", precision)
	}
}

// TestInt8OptimizerIsOffloaded checks that 8-bit moments can be offloaded. An update on the host
// uses pieces of complete blocks, each with its scales.
func TestInt8OptimizerIsOffloaded(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Steps, c.Clip, c.Zero, c.Int8 = 3, 3, 1, 1, []string{"optimizer"}
	want := runOf(t, c)
	for i, offload := range []string{"optimizer=host", "optimizer=host:50%,parameters=host", "gradients=host", "optimizer=disk,parameters=disk,gradients=disk", "optimizer=host:40%+disk"} {
		d := c
		d.Zero, d.Offload, d.offloadChunk = 1+i%3, offload, 1024
		if strings.Contains(offload, "disk") {
			d.Disk = t.TempDir()
		}
		require.Equal(t, want.sha, runOf(t, d).sha, "stage %d, %s", d.Zero, offload)
		d.offloadChunk = 0
		require.Equal(t, want.sha, runOf(t, d).sha, "stage %d, %s", d.Zero, offload)
	}
}

// TestHalfBytesOfStates checks the planned bytes: 2Ψ each for 16-bit parameters and gradients, and
// 12Ψ/N for masters and moments. 8-bit moments need 2·(1 + 4/256) bytes per element.
func TestHalfBytesOfStates(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Precision, c.Batch, c.Seq = 2, "bf16", 1, 8
	states := func(z int, int8 ...string) (params, grads, optimizer int64) {
		c.Zero, c.Int8 = z, int8
		p, err := c.planned().Plan(t.Context())
		require.NoError(t, err)
		for i := range p.Program.Buffers {
			b := &p.Program.Buffers[i]
			switch n := b.Bytes() - b.Pad; {
			case b.View != nil || b.Space != graph.Device || b.Life == graph.LifePhase:
			case b.Class == graph.Parameters:
				params += n
			case b.Class == graph.Gradients:
				grads += n
			case b.Class == graph.Optimizer:
				optimizer += n
			}
		}
		return params, grads, optimizer
	}
	p, err := c.planned().Plan(t.Context())
	require.NoError(t, err)
	var psi, blocks int64
	for i := range p.Program.Params {
		psi += p.Program.Params[i].Elems()
		blocks += (p.Program.Params[i].Elems() + 255) / 256
	}
	params, grads, optimizer := states(0)
	require.Equal(t, []int64{2 * psi, 2 * psi, 12 * psi}, []int64{params, grads, optimizer})
	_, _, optimizer = states(1)
	require.Equal(t, (psi+1)/2*12, optimizer)
	params, grads, _ = states(3)
	require.Equal(t, []int64{(psi + 1) / 2 * 2, (psi + 1) / 2 * 2}, []int64{params, grads})
	c.OptimizerDType, c.StochasticRounding = "bf16", true
	params, grads, optimizer = states(0)
	require.Equal(t, []int64{2 * psi, 2 * psi, 4 * psi}, []int64{params, grads, optimizer}, "bf16 moments and no masters")
	c.OptimizerDType, c.StochasticRounding = "", false
	_, _, optimizer = states(0, "optimizer")
	require.LessOrEqual(t, optimizer, 4*psi+2*(psi+4*blocks))
	require.Greater(t, optimizer, 4*psi+2*psi)
	_, _, optimizer = states(3, "optimizer")
	require.LessOrEqual(t, optimizer, (4*psi+2*(psi+4*blocks))/2+2*(graph.QuantBlock+4)*int64(len(p.Program.Units)), "a block more a unit at most")
}

// TestInt8KeepsPromise1 enables all int8 options at once. Placements, recomputation and threads
// must not change the bits. Package precision tests each option alone.
func TestInt8KeepsPromise1(t *testing.T) {
	t.Parallel()
	c := tiny("llama-untied")
	c.Ranks, c.Steps, c.Clip, c.Precision, c.Zero = 3, 2, 1, "bf16", 0
	c.Int8 = []string{"optimizer", "gather", "reduce", "activations", "matmul"}
	want := runOf(t, c)
	for _, change := range []func(*request){
		func(c *request) { c.Zero, c.Prefetch, c.Recompute = 3, 0, "full" },
		func(c *request) {
			c.Zero, c.Threads, c.Recompute, c.Offload = 2, 1, "selective", "optimizer=host,gradients=host,parameters=host,activations=host"
		},
	} {
		d := c
		change(&d)
		got := runOf(t, d)
		require.Equal(t, want.losses, got.losses)
		require.Equal(t, want.sha, got.sha)
	}
}

// TestBF16StatesKeepPromise1 checks bf16 moments and parameters without masters. The bits must be
// the same at every stage and placement, and through a checkpoint, which stores them exactly.
func TestBF16StatesKeepPromise1(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Steps, c.Clip, c.Precision, c.Zero = 3, 4, 1, "bf16", 0
	plain := runOf(t, c)
	c.OptimizerDType, c.StochasticRounding = "bf16", true
	want := runOf(t, c)
	require.NotEqual(t, plain.sha, want.sha)
	require.InEpsilon(t, plain.losses[3], want.losses[3], 1e-2)
	d := c
	d.Zero, d.Recompute, d.Offload = 3, "full", "optimizer=host,parameters=host,activations=host"
	require.Equal(t, want.sha, runOf(t, d).sha)
	d.Seed++
	require.NotEqual(t, want.sha, runOf(t, d).sha)
	d = c
	d.Checkpoint, d.Steps, d.Zero = t.TempDir(), 2, 2
	runOf(t, d)
	d.Resume, d.Steps, d.Zero = true, 4, 1
	require.Equal(t, want.sha, runOf(t, d).sha, "resumed")

	for want, change := range map[string]func(*request){
		"without Config.StochasticRounding": func(c *request) { c.StochasticRounding = false },
		"without Config.OptimizerDType":     func(c *request) { c.OptimizerDType = "" },
		"with Config.Precision fp16":        func(c *request) { c.Precision = "fp16" },
		"with Config.Optimizer sgd":         func(c *request) { c.Optimizer = "sgd" },
		"with Config.Int8 optimizer":        func(c *request) { c.Int8 = []string{"optimizer"} },
		"with Config.Int8 gather":           func(c *request) { c.Int8 = []string{"gather"} },
		"with Config.Device cuda":           func(c *request) { c.Device = "cuda" },
		"use fp32 or bf16":                  func(c *request) { c.OptimizerDType = "fp8" },
	} {
		d := c
		change(&d)
		require.ErrorContains(t, errors.Join(d.Validate(), d.Runnable()), want)
	}
}

func TestInt8IsValidated(t *testing.T) {
	t.Parallel()
	for want, change := range map[string]func(*request){
		"use optimizer":                      func(c *request) { c.Int8 = []string{"everything"} },
		"Config.Int8 gather":                 func(c *request) { c.Int8 = []string{"optimizer", "gather"} },
		"Config.Optimizer sgd":               func(c *request) { c.Optimizer = "sgd" },
		"Config.Int8 with Config.Device cud": func(c *request) { c.Device = "cuda" },
	} {
		c := tiny("gpt2")
		c.Int8 = []string{"optimizer"}
		change(&c)
		err := errors.Join(c.Validate(), c.Runnable())
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, "Config.Int8")
	}
	for want, change := range map[string]func(*request){
		"Config.Int8 matmul with Config.Precision fp32": func(c *request) { c.Int8 = []string{"matmul"} },
		"use optimizer, gather, reduce, activ":          func(c *request) { c.Int8 = []string{"weights"} },
	} {
		c := tiny("gpt2")
		change(&c)
		require.ErrorContains(t, c.Validate(), want)
	}
	c := tiny("gpt2")
	c.Precision, c.Int8 = "bf16", []string{"gather", "activations"}
	fitted, err := c.planned().Fit(t.Context(), planner.Fixed{Zero: true, Prefetch: true, Batch: true, Accum: true, AccumOrder: true, Precision: true, Recompute: true, Offload: true}, 0, briefly(1))
	require.NoError(t, err)
	require.Equal(t, c.Int8, fitted.Forecast.Config.Int8)

	c.Int8 = []string{"optimizer"}
	c.Ranks, c.Zero, c.DeviceMemory = 2, 0, 100<<10 // still refused with DoesNotFit; computing the ways out must not fail
	_, err = c.start(t.Context())
	var full *plan.DoesNotFit
	require.ErrorAs(t, err, &full)
}
