//go:build linux

package train

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/device/cuda/dynlib"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
	"github.com/spillway-ml/spillway/internal/testkit/fault"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/platform/gpu"
)

// runOnDouble is runOf on a double that must find no error: no unordered conflicting accesses, no
// access outside an arena, no leak.
func runOnDouble(t testing.TB, c request, o drivertest.Options, gpuKernels bool) outcome {
	t.Helper()
	d := onDouble(t, &c, o, gpuKernels)
	got := runOf(t, c)
	require.NoError(t, d.Close())
	return got
}

// TestCUDAHostSideGivesTheSameBits runs the CPU's kernels on the double. Stage, recomputation,
// placement and ranks must not change the bits, which equal those of the CPU device. runOf also
// checks that touched memory equals the plan in all three spaces.
func TestCUDAHostSideGivesTheSameBits(t *testing.T) {
	t.Parallel()
	turn := 0
	for _, ranks := range []int{1, 3} {
		c := tiny("gpt2")
		c.Ranks, c.Steps, c.Batch, c.Seq, c.Dropout, c.Clip, c.Zero = ranks, 2, 1, 16, 0.1, 1, 0
		want := runOf(t, c)
		for i, placement := range append([]string{""}, placements...) {
			if !long.On() && i%4 != ranks/2 { // a quarter of the placements with each number of ranks
				continue
			}
			for _, zero := range inTurn(turn, []int{0, 1, 2, 3}) {
				one := c
				one.Zero, one.Prefetch, one.Offload, one.Disk = zero, turn%3, placement, t.TempDir()
				one.offloadChunk = []int64{0, 1024, 3072}[(turn/2)%3]
				one.Recompute = []string{"none", "full", "selective"}[(turn+i)%3]
				at := fmt.Sprintf("%d ranks, stage %d, prefetch %d, chunk %d, recompute %s, %s", ranks, zero, one.Prefetch, one.offloadChunk, one.Recompute, placement)
				got := runOnDouble(t, one, drivertest.Options{Seed: uint64(turn % 3)}, false)
				require.Equal(t, want.losses, got.losses, at)
				require.Equal(t, want.sha, got.sha, at)
				turn++
			}
		}
	}
}

// TestCUDAKernelsGiveTheSameBits runs the GPU's kernels: the bits must be the same for all
// variants, and the losses near the CPU's.
func TestCUDAKernelsGiveTheSameBits(t *testing.T) {
	t.Parallel()
	for turn, model := range []string{"llama-tied", "gpt2"} {
		for _, ranks := range inTurn(turn, []int{1, 3}) {
			c := tiny(model)
			c.Ranks, c.Steps, c.Batch, c.Seq, c.Clip, c.Zero = ranks, 2, 1, 8, 1, 0
			onCPU := runOf(t, c)
			want := runOnDouble(t, c, drivertest.Options{}, true)
			for s := range want.losses {
				require.InEpsilon(t, onCPU.losses[s], want.losses[s], 1e-5, "%s, %d ranks, step %d", model, ranks, s+1)
			}
			for i, placement := range []string{"", "optimizer=host,gradients=host", "optimizer=disk,parameters=host,activations=host", "parameters=disk,gradients=disk,activations=disk"} {
				if !long.On() && i%2 != turn { // half of the placements with each model
					continue
				}
				one := c
				one.Zero, one.Offload, one.Disk = 3-i, placement, t.TempDir()
				one.Recompute = []string{"full", "none", "selective"}[i%3]
				got := runOnDouble(t, one, drivertest.Options{Seed: uint64(i)}, true)
				at := fmt.Sprintf("%s, %d ranks, stage %d, recompute %s, %s", model, ranks, one.Zero, one.Recompute, placement)
				require.Equal(t, want.losses, got.losses, at)
				require.Equal(t, want.sha, got.sha, at)
			}
		}
	}
}

// TestCUDATrainsIn16Bits checks bf16 and fp16. With the CPU's kernels the bits are those of the CPU
// device. The GPU's kernels give one result at every stage and placement, near the CPU's.
func TestCUDATrainsIn16Bits(t *testing.T) {
	t.Parallel()
	for _, precision := range []string{"bf16", "fp16"} {
		t.Run(precision, func(t *testing.T) { cudaTrainsIn(t, precision) })
	}
}

// TestCUDAEpiloguesGiveTheSameBits enables all epilogues. Stage, recomputation, placement, prefetch
// and, in reproducible runs, the number of ranks must not change a bit. Runs without epilogues give
// slightly different losses.
func TestCUDAEpiloguesGiveTheSameBits(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Ranks, c.Steps, c.Batch, c.Seq, c.Clip, c.Zero, c.Accum = 2, 2, 1, 8, 1, 0, 2
	c.Precision, c.Reproducible, c.Epilogues = "bf16", true, []string{"all"}
	want := runOnDouble(t, c, drivertest.Options{}, true)
	type variant struct {
		ranks, zero        int
		recompute, offload string
	}
	variants := []variant{{2, 3, "full", "optimizer=disk,parameters=host"}, {4, 2, "none", "parameters=disk"}}
	if long.On() {
		variants = append(variants, variant{2, 2, "selective", "gradients=host,activations=host"},
			variant{2, 1, "full", "optimizer=host"}, variant{1, 3, "none", ""})
	}
	for _, v := range variants {
		one := c
		one.Ranks, one.Accum, one.Zero, one.Prefetch = v.ranks, 4/v.ranks, v.zero, v.zero-1
		one.Recompute, one.Offload, one.Disk = v.recompute, v.offload, t.TempDir()
		got := runOnDouble(t, one, drivertest.Options{Seed: uint64(v.zero)}, true)
		require.Equal(t, want.losses, got.losses, "%+v", v)
		require.Equal(t, want.sha, got.sha, "%+v", v)
	}
	// Without Reproducible, gradients are added within a step as soon as they are computed.
	c.Reproducible, c.Reduce = false, "fp32"
	once := runOnDouble(t, c, drivertest.Options{}, true)
	c.Zero, c.Recompute, c.Offload = 1, "full", "optimizer=host"
	again := runOnDouble(t, c, drivertest.Options{Seed: 2}, true)
	require.Equal(t, once.losses, again.losses)
	require.Equal(t, once.sha, again.sha)

	c.Epilogues = []string{"none"}
	apart := runOnDouble(t, c, drivertest.Options{}, true)
	require.NotEqual(t, once.sha, apart.sha)
	for s := range apart.losses {
		require.InEpsilon(t, apart.losses[s], once.losses[s], 5e-3, "step %d", s+1)
	}
}

func cudaTrainsIn(t *testing.T, precision string) {
	c := tiny("gpt2")
	c.Ranks, c.Steps, c.Batch, c.Seq, c.Clip, c.Zero, c.Precision = 2, long.Or(2, 3), 1, 8, 1, 0, precision
	onCPU := runOf(t, c)
	var own *outcome
	for zero, placement := range []string{"", "optimizer=host", "activations=host", "optimizer=disk,parameters=host"} {
		if precision == "fp16" && zero != 3 {
			continue // the GPU's kernels are slow here; bf16 covers the other stages
		}
		one := c
		one.Zero, one.Offload, one.Disk, one.Recompute = zero, placement, t.TempDir(), []string{"none", "full"}[zero%2]
		host := runOnDouble(t, one, drivertest.Options{}, false)
		require.Equal(t, onCPU.losses, host.losses, "stage %d", zero)
		require.Equal(t, onCPU.sha, host.sha, "stage %d", zero)
		got := runOnDouble(t, one, drivertest.Options{}, true)
		if own == nil {
			own = &got
			for s := range onCPU.losses {
				require.InEpsilon(t, onCPU.losses[s], got.losses[s], 5e-3, "step %d", s+1)
			}
		}
		require.Equal(t, own.losses, got.losses, "stage %d", zero)
		require.Equal(t, own.sha, got.sha, "stage %d", zero)
	}
}

// TestCUDAHostSideOfOtherRuns compares further runs with the CPU: mesh groups, accumulation, frozen
// parameters with their cache, and other optimizers and models.
func TestCUDAHostSideOfOtherRuns(t *testing.T) {
	for name, change := range map[string]func(c *request){
		"hsdp":         func(c *request) { c.Ranks, c.ShardSize, c.Accum = 4, 2, 2 },
		"reproducible": func(c *request) { c.Ranks, c.Accum, c.Reproducible = 3, 2, true },
		"frozen": func(c *request) {
			c.Freeze, c.FrozenCache = []string{"wte*", "wpe*", "h.0.*"}, config.FrozenCache{Tier: graph.Host, Bytes: 1 << 20}
		},
		"lamb":  func(c *request) { c.Optimizer, c.Clip, c.Offload = "lamb", 1, "optimizer=host" },
		"llama": func(c *request) { c.Model, c.Init, c.Zero = "../testdata/llama-untied", "../testdata/llama-untied", 2 },
	} {
		c := tiny("gpt2")
		c.Ranks, c.Steps, c.Batch, c.Seq = 2, 3, 1, 16
		change(&c)
		want := runOf(t, c)
		got := runOnDouble(t, c, drivertest.Options{Seed: 5}, false)
		require.Equal(t, want.losses, got.losses, name)
		require.Equal(t, want.sha, got.sha, name)
	}
}

// TestCUDALostRank checks that a rank that fails or hangs ends the job on every rank, as
// TestALostRankEndsTheJob does.
func TestCUDALostRank(t *testing.T) {
	const timeout, sick = 700 * time.Millisecond, 1
	for label, mode := range map[string]fault.Mode{"h.1.mlp.c_fc": fault.Hang, "adamw": fault.Panic, "h.0/all_gather": fault.AtLaunch, "tokens/in": fault.WhenRun, "loss/all_reduce": fault.Hang} {
		c := tiny("gpt2")
		c.Ranks, c.Zero, c.Steps, c.Timeout, c.poison, c.Batch, c.Seq = 3, 3, 100, timeout, false, 1, 16
		d := onDouble(t, &c, drivertest.Options{}, false)
		var hurt *fault.Context
		c.wrapDevice = func(rank int, ctx device.Context) device.Context {
			if rank != sick {
				return ctx
			}
			hurt = fault.Wrap(ctx, fault.Plan{Launch: 10, Label: label, Mode: mode})
			return hurt
		}
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		began := time.Now()
		err = tr.Run(context.Background(), nil)
		require.True(t, hurt.Fired(), label)
		require.Less(t, time.Since(began), timeout+20*time.Second, label)
		require.ErrorContains(t, err, fmt.Sprintf("step %d", tr.Done()+1), label)
		require.ErrorContains(t, err, fmt.Sprintf("rank %d", sick), label)
		if mode == fault.Hang {
			require.ErrorIs(t, err, comm.ErrTimeout, label)
		} else {
			require.ErrorContains(t, err, label)
		}
		_ = tr.Close() // its error repeats the run's
		require.NoError(t, d.Close(), label)
	}
}

// TestCUDARunWhole runs evaluation, accumulation, a trace and generation. Another number of ranks
// resumes from the checkpoint on the CPU.
func TestCUDARunWhole(t *testing.T) {
	c := tiny("gpt2")
	dir := t.TempDir()
	c.Ranks, c.Steps, c.Accum, c.Batch, c.Seq, c.Reproducible = 2, 2, 2, 1, 16, true
	c.EvalData, c.EvalSteps, c.Generate = c.Data, 2, true
	c.Checkpoint, c.Trace = filepath.Join(dir, "ckpt"), filepath.Join(dir, "trace.json")
	whole := c
	whole.Steps, whole.Checkpoint, whole.Trace = 4, "", ""
	want := runOf(t, whole)
	d := onDouble(t, &c, drivertest.Options{}, false)
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	require.Contains(t, tr.Device(), "GPU 0, Double (compute capability 8.0")
	var evals int
	require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
		if r.Eval != nil {
			evals++
		}
		return nil
	}))
	require.Equal(t, 1, evals)
	text, err := tr.Generate(context.Background(), "ab", 3, Sampling{})
	require.NoError(t, err)
	require.Greater(t, len(text), 2)
	require.NoError(t, tr.Close())
	require.NoError(t, d.Close())
	trace, err := os.ReadFile(c.Trace)
	require.NoError(t, err)
	require.Contains(t, string(trace), "all_gather")

	rest := whole
	rest.Resume, rest.Checkpoint, rest.Ranks = true, c.Checkpoint, 2
	got := runOf(t, rest)
	require.Equal(t, want.losses[2:], got.losses)
	require.Equal(t, want.sha, got.sha)
}

// TestCUDACapIsTheSmallerOfWhatIsAskedAndFree checks that a run one byte over the cap is refused.
// The error must name the cap that applied: the setting or the free memory.
func TestCUDACapIsTheSmallerOfWhatIsAskedAndFree(t *testing.T) {
	base := tiny("gpt2")
	base.Ranks, base.Batch, base.Seq, base.Steps = 2, 1, 16, 1
	probe := base
	d := onDouble(t, &probe, drivertest.Options{}, false)
	tr, err := probe.start(context.Background())
	require.NoError(t, err)
	need := tr.Plan().Layout.Spaces[graph.Device].Peak + tr.Config().Outside[graph.Device]
	require.NoError(t, errors.Join(tr.Close(), d.Close()))

	attempt := func(asked int64, o drivertest.Options) error {
		c := base
		c.DeviceMemory = asked
		d := onDouble(t, &c, o, false)
		tr, err := c.start(context.Background())
		if err == nil {
			err = tr.Close()
		}
		require.NoError(t, d.Close())
		return err
	}
	require.NoError(t, attempt(need, drivertest.Options{}))
	var refused *plan.DoesNotFit
	err = attempt(need-1, drivertest.Options{})
	require.ErrorAs(t, err, &refused)
	require.ErrorContains(t, err, "this cap is Config.DeviceMemory (the GPU has 16.00 GiB free)")
	const used = 1 << 30
	require.NoError(t, attempt(0, drivertest.Options{Memory: 2*need + used, Used: used}))
	err = attempt(0, drivertest.Options{Memory: 2*need + used - 2, Used: used})
	require.ErrorAs(t, err, &refused)
	require.ErrorContains(t, err, "this cap is what is free on GPU 0, Double: ")
	require.ErrorContains(t, err, " over 2 ranks, where others use 1.00 GiB")
	err = attempt(need, drivertest.Options{Memory: 2*need + used - 2, Used: used})
	require.ErrorContains(t, err, "what is free on GPU 0")
	require.ErrorContains(t, err, "; Config.DeviceMemory allows ")
}

func TestCUDAWithoutADriver(t *testing.T) {
	c := tiny("gpt2")
	c.Device = "cuda"
	c.cuda = &gpu.Parts{Driver: func() (driver.API, error) {
		return nil, &dynlib.NotFound{What: "NVIDIA's driver", Names: []string{"libcuda.so.1"}}
	}}
	_, err := c.start(context.Background())
	var missing *MissingDevice
	require.ErrorAs(t, err, &missing)
	require.ErrorContains(t, err, "Config.Device cuda: NVIDIA's driver was not found: looked for libcuda.so.1 in ")
	require.NotContains(t, err.Error(), "\n")

	d := onDouble(t, &c, drivertest.Options{Devices: -1}, false)
	_, err = c.start(context.Background())
	require.ErrorAs(t, err, &missing)
	require.ErrorContains(t, err, "the driver shows no GPU")
	require.NoError(t, d.Close())
	p, err := c.planned().Plan(t.Context())
	require.NoError(t, err, "a plan needs no GPU")
	require.Positive(t, p.Layout.Spaces[graph.Device].Peak)
}

// TestCUDAEveryCallCanFail makes each driver call and each device operation fail. The error must
// name the call and its code and, once operations run, one of them. Nothing may hang or leak.
func TestCUDAEveryCallCanFail(t *testing.T) {
	everyCallCanFail(t, drivertest.Options{}, func(string) bool { return true })
}

// everyCallCanFail makes each call selected by chosen fail at some of its occurrences.
func everyCallCanFail(t *testing.T, o drivertest.Options, chosen func(call string) bool) {
	attempt := func(tell func(*drivertest.Driver)) (calls map[string]int, err, left error) {
		c := tiny("gpt2")
		c.Ranks, c.Steps, c.Batch, c.Seq, c.Zero, c.poison = 2, 2, 1, 8, 3, false
		c.Offload, c.Timeout, c.CUDAGraphs = "optimizer=host,activations=host", 20*time.Second, "off" // because a failed capture is not an error
		d := onDouble(t, &c, o, false)
		tell(d)
		tr, err := c.start(context.Background())
		if err == nil {
			err = errors.Join(tr.Run(context.Background(), nil), tr.Close())
		}
		return d.Calls(), err, d.Close()
	}
	calls, err, left := attempt(func(*drivertest.Driver) {})
	require.NoError(t, errors.Join(err, left))
	for call, n := range calls {
		if !chosen(call) {
			continue
		}
		times := []int{1, 1 + n/3, 1 + 2*n/3, n}
		if !long.All() { // the first, and one other that depends on the call
			times = []int{1, times[1+len(call)%3]}
		}
		for _, nth := range times {
			began := time.Now()
			tell := func(d *drivertest.Driver) { d.Fail(call, nth, 999) }
			want := call + ": CUDA_ERROR_UNKNOWN (999)"
			if call == "run" {
				tell = func(d *drivertest.Driver) { d.FailRun(nth, 719) }
				want = "CUDA_ERROR_LAUNCH_FAILED (719)"
			}
			name := fmt.Sprintf("%s, call %d of %d", call, nth, n)
			made, err, left := attempt(tell)
			require.NoError(t, left, name)
			require.Less(t, time.Since(began), 20*time.Second, name)
			if made[call] < nth { // the number of event queries depends on timing
				require.Equal(t, "cuEventQuery", call, name)
				continue
			}
			if call == "cuEventQuery" && nth > 1 && err == nil {
				continue // a rank that ends queries its peers' events until one answers
			}
			require.ErrorContains(t, err, want, name)
			switch call {
			case "run", "Run", "cuMemcpyDtoDAsync_v2", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuStreamWaitEvent":
				if o.Devices > 1 && nth == 1 {
					continue // the GPUs' first exchange runs before any operation
				}
				require.ErrorContains(t, err, "operation ", name)
			}
		}
	}
}
