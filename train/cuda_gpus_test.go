//go:build linux

package train

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
	"github.com/spillway-ml/spillway/internal/testkit/fault"
	"github.com/spillway-ml/spillway/plan"
)

// TestCUDASeveralGPUsGiveTheSameBits runs one or two ranks per GPU at several stages, placements
// and precisions. The bits must be those of one process on the CPU. Data between GPUs must use
// driver copies: the double fails a kernel that accesses another card.
func TestCUDASeveralGPUsGiveTheSameBits(t *testing.T) {
	for i, c := range []struct {
		ranks, gpus int
		precision   string
		zero        []int
	}{{2, 2, "fp32", []int{0, 1, 2, 3}}, {3, 3, "fp32", []int{3, 0}}, {4, 2, "bf16", []int{1, 2, 3}}, {3, 3, "bf16", []int{0, 3}}, {4, 4, "shards of 2", []int{3}}} {
		base := tiny("gpt2")
		base.Ranks, base.Steps, base.Batch, base.Seq, base.Clip, base.Precision = c.ranks, 2, 1, 16, 1, c.precision
		if c.precision == "shards of 2" { // with replicas
			base.Precision, base.ShardSize = "fp32", 2
		}
		want := runOf(t, base)
		for j, zero := range c.zero {
			one := base
			one.Zero, one.Disk = zero, t.TempDir()
			one.Offload = []string{"", "optimizer=host,gradients=host", "activations=host", "optimizer=disk,parameters=host"}[j]
			one.Reproducible = c.precision == "fp32" && zero == 2
			expect := want
			if one.Reproducible {
				same := base
				same.Reproducible = true
				expect = runOf(t, same)
			}
			got := runOnDouble(t, one, drivertest.Options{Devices: c.gpus, Seed: uint64((i + j) % 3)}, false)
			at := fmt.Sprintf("%d ranks on %d GPUs, %s, stage %d, %s", c.ranks, c.gpus, c.precision, zero, one.Offload)
			require.Equal(t, expect.losses, got.losses, at)
			require.Equal(t, expect.sha, got.sha, at)
		}
	}
}

// TestCUDAKernelsOnTwoGPUs checks that two ranks give the same bits on one GPU and on two, with and
// without a link.
func TestCUDAKernelsOnTwoGPUs(t *testing.T) {
	for i, precision := range []string{"fp32", "bf16"} {
		c := tiny("gpt2")
		c.Ranks, c.Steps, c.Batch, c.Seq, c.Clip, c.Zero, c.Precision = 2, 2, 1, 8, 1, 3-i, precision
		want := runOnDouble(t, c, drivertest.Options{}, true)
		got := runOnDouble(t, c, drivertest.Options{Devices: 2, NoLink: func(a, b int) bool { return i == 1 }}, true)
		require.Equal(t, want.losses, got.losses, precision)
		require.Equal(t, want.sha, got.sha, precision)
	}
}

// TestCUDALostGPU checks that a rank that fails on one GPU ends the job on all. The error for a
// rank that hangs must name the rank and its GPU.
func TestCUDALostGPU(t *testing.T) {
	const timeout = 700 * time.Millisecond
	start := func(c *request) (*Trainer, *drivertest.Driver) {
		c.Ranks, c.Zero, c.Steps, c.Timeout, c.poison, c.Batch, c.Seq = 3, 3, 100, timeout, false, 1, 16
		d := onDouble(t, c, drivertest.Options{Devices: 3}, false)
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		return tr, d
	}
	c := tiny("gpt2")
	c.wrapDevice = func(rank int, ctx device.Context) device.Context {
		if rank != 1 {
			return ctx
		}
		return fault.Wrap(ctx, fault.Plan{Launch: 10, Label: "h.1.mlp.c_fc", Mode: fault.Hang})
	}
	tr, d := start(&c)
	err := tr.Run(context.Background(), nil)
	require.ErrorIs(t, err, comm.ErrTimeout)
	require.ErrorContains(t, err, "1 (GPU 1) did not arrive")
	_ = tr.Close() // its error repeats the run's
	require.NoError(t, d.Close())

	c = tiny("gpt2")
	tr, d = start(&c)
	d.FailRun(d.Calls()["run"]+200, 719)
	err = tr.Run(context.Background(), nil)
	require.ErrorContains(t, err, "CUDA_ERROR_LAUNCH_FAILED (719)")
	require.Regexp(t, `rank (0, .* of GPU 0: |1, .* of GPU 1: |2, .* of GPU 2: |0 \(GPU 0\)|1 \(GPU 1\)|2 \(GPU 2\))`, err.Error())
	_ = tr.Close()
	require.NoError(t, d.Close())
}

// TestCUDAPlanIsWhatEachGPUGives checks that a job's use of each GPU equals its plan: arenas, data
// from peers, and memory outside the arenas. All ranks plan for the GPU with the least memory.
func TestCUDAPlanIsWhatEachGPUGives(t *testing.T) {
	c := tiny("gpt2")
	c.Ranks, c.Steps, c.Batch, c.Seq, c.Zero = 2, 1, 1, 16, 2
	attempt := func(memory [2]int64, zero int) (p *plan.Plan, most [2]int64, err error) {
		one := c
		one.Zero = zero
		d := onDouble(t, &one, drivertest.Options{Devices: 2, Change: func(d *driver.Device) { d.Memory = memory[d.Ordinal] }}, false)
		tr, err := one.start(context.Background())
		if err == nil {
			p = tr.Plan()
			require.Contains(t, tr.Device(), "2 GPUs, Double (compute capability 8.0, 4 multiprocessors), a rank each: ")
			err = errors.Join(tr.Run(context.Background(), nil), tr.Close())
			most = [2]int64{d.Most(0), d.Most(1)}
		}
		require.NoError(t, d.Close())
		return p, most, err
	}
	const plenty = 4 << 30
	p, most, err := attempt([2]int64{plenty, plenty}, 2)
	require.NoError(t, err)
	peak, outside := p.Layout.Spaces[graph.Device].Peak, p.Config.Outside[graph.Device]
	require.Equal(t, most[0], most[1])
	require.Greater(t, most[0], peak, "pieces of sums come to memory of their own")
	require.LessOrEqual(t, most[0], peak+outside)
	_, _, err = attempt([2]int64{plenty, peak + outside}, 2)
	require.NoError(t, err)
	var refused *plan.DoesNotFit
	_, _, err = attempt([2]int64{plenty, peak + outside - 1}, 2)
	require.ErrorAs(t, err, &refused)
	require.ErrorContains(t, err, "this cap is what is free on GPU 1, Double: ")
}

// TestCUDAGPUsThatDoNotGoTogether checks errors for rank counts that the GPUs cannot share evenly,
// for GPUs of different kinds, and for GPUs that send wrong data.
func TestCUDAGPUsThatDoNotGoTogether(t *testing.T) {
	attempt := func(ranks int, o drivertest.Options) error {
		c := tiny("gpt2")
		c.Ranks, c.Batch, c.Seq = ranks, 1, 16
		d := onDouble(t, &c, o, false)
		tr, err := c.start(context.Background())
		if err == nil {
			err = tr.Close()
		}
		require.NoError(t, d.Close())
		return err
	}
	require.ErrorContains(t, attempt(3, drivertest.Options{Devices: 2}), "Config.Ranks 3: as many ranks don't share the 2 GPUs that the driver shows evenly; take a multiple of 2")
	other := func(d *driver.Device) {
		if d.Ordinal == 1 {
			d.Major = 9
		}
	}
	require.ErrorContains(t, attempt(2, drivertest.Options{Devices: 2, Change: other}), "GPU 0, Double (compute capability 8.0, 4 multiprocessors), and GPU 1, Double (compute capability 9.0, 4 multiprocessors), differ")
	require.NoError(t, attempt(1, drivertest.Options{Devices: 2, Change: other}), "the second is not used")
	garbles := func(from, to int) bool { return from == 2 && to == 1 }
	require.ErrorContains(t, attempt(3, drivertest.Options{Devices: 3, Garbles: garbles}), "what GPU 2 sends to GPU 1 arrives changed")
}

// TestCUDAEveryCallBetweenGPUsCanFail makes each call specific to several GPUs fail. No failure may
// hang a rank or leak resources.
func TestCUDAEveryCallBetweenGPUsCanFail(t *testing.T) {
	between := []string{"cuDeviceCanAccessPeer", "cuCtxEnablePeerAccess", "cuMemcpyPeerAsync", "cuStreamWaitEvent", "cuEventRecord", "cuStreamCreate", "run"}
	everyCallCanFail(t, drivertest.Options{Devices: 2}, func(call string) bool { return slices.Contains(between, call) })
}
