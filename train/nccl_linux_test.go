package train

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm/nccl"
	"github.com/spillway-ml/spillway/comm/nccl/nccltest"
	"github.com/spillway-ml/spillway/device/cuda/drivertest"
)

// joinedGPUs makes the processes of a job, each with a GPU of one double and NCCL between them,
// and returns what to close at its end.
func joinedGPUs(t testing.TB, c *request, processes int, o drivertest.Options, f nccltest.Options) (leader *Job, others []*Job, fabric *nccltest.Fabric, end func()) {
	t.Helper()
	o.Devices = processes
	d := onDouble(t, c, o, false)
	fabric = nccltest.New(d, f)
	c.cuda.NCCL = func() (nccl.API, error) { return fabric.Library(22105), nil }
	leader, others = joined(t, processes)
	for _, j := range others {
		j.cuda = c.cuda
	}
	return leader, others, fabric, func() {
		require.NoError(t, fabric.Close())
		require.NoError(t, d.Close())
	}
}

// overGPUs runs c as a job of so many processes with a GPU each.
func overGPUs(t *testing.T, c request, processes int, o drivertest.Options, run func(testing.TB, request) outcome) outcome {
	t.Helper()
	leader, others, _, end := joinedGPUs(t, &c, processes, o, nccltest.Options{Looks: 2})
	ends := make(chan error)
	for _, j := range others {
		go func() {
			_, err := Work(context.Background(), j, nil)
			ends <- err
		}()
	}
	c.Config = c.Config.Over(leader)
	got := run(t, c)
	for range others {
		require.NoError(t, <-ends)
	}
	end()
	return got
}

// A run over processes with a GPU each and NCCL between them has the bits of the CPU's
// ranks in one process, at every stage, in groups and with states on the host and on disk:
// promise 1, and in runOf promise 2.
func TestNCCLGivesTheSameBits(t *testing.T) {
	for turn, c := range []struct {
		processes int
		change    func(*request)
	}{
		{2, func(c *request) { c.Zero, c.Clip = 0, 1 }},
		{3, func(c *request) { c.Zero, c.Recompute = 1, "full" }},
		{2, func(c *request) { c.Zero, c.Accum, c.Reproducible = 2, 2, true }},
		{3, func(c *request) { c.Zero, c.Recompute = 3, "selective" }},
		{4, func(c *request) { c.Zero, c.ShardSize, c.Clip = 3, 2, 1 }},
		{2, func(c *request) { c.Zero, c.Disk, c.Offload = 3, t.TempDir(), "optimizer=disk,activations=host" }},
	} {
		cfg := tiny("gpt2")
		cfg.Batch, cfg.Seq, cfg.Steps, cfg.Dropout = 1, 16, 2, 0.1
		c.change(&cfg)
		how := runOf
		if cfg.ShardSize > 0 {
			how = runMesh
		}
		one := cfg
		one.Ranks = c.processes
		want := how(t, one)
		got := overGPUs(t, cfg, c.processes, drivertest.Options{Seed: uint64(turn % 3)}, how)
		at := fmt.Sprintf("turn %d", turn)
		require.Equal(t, want.losses, got.losses, at)
		require.Equal(t, want.sha, got.sha, at)
	}
}

// What NCCL finds wrong ends the job in every process, in time.
func TestNCCLErrorEndsTheJob(t *testing.T) {
	c := tiny("gpt2")
	c.Batch, c.Seq, c.Steps, c.Timeout = 1, 16, 50, 20*time.Second
	leader, others, fabric, end := joinedGPUs(t, &c, 2, drivertest.Options{}, nccltest.Options{})
	ends := make(chan error)
	go func() {
		_, err := Work(context.Background(), others[0], nil)
		ends <- err
	}()
	c.Config = c.Config.Over(leader)
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	err = tr.Run(context.Background(), func(r StepResult) error {
		if r.Step == 1 {
			fabric.Break(1, nccl.RemoteError)
		}
		return nil
	})
	require.ErrorContains(t, err, "rank 1")
	require.ErrorContains(t, err, "as told (6)")
	_ = tr.Close() // has nothing to add
	<-ends
	end()
}
