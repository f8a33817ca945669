package train

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm/nccl"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/internal/testkit/nccltest"
	"github.com/spillway-ml/spillway/platform/gpu"
	"github.com/spillway-ml/spillway/run"
	"github.com/spillway-ml/spillway/train/job"
)

// joinedGPUs starts the processes of a job whose ranks each have a GPU of one double and
// communicate over NCCL. end closes them.
func joinedGPUs(t testing.TB, c *request, processes int, o drivertest.Options, f nccltest.Options) (leader *job.Job, others []*job.Job, fabric *nccltest.Fabric, end func()) {
	t.Helper()
	o.Devices = processes * max(c.LocalRanks, 1)
	d := onDouble(t, c, o, false)
	fabric = nccltest.New(d, f)
	c.cuda.NCCL = func() (nccl.API, error) { return fabric.Library(22105), nil }
	leader, others = joined(t, processes)
	return leader, others, fabric, func() {
		require.NoError(t, fabric.Close())
		require.NoError(t, d.Close())
	}
}

// overGPUs runs c as a job of the given number of processes, with a GPU for each rank.
func overGPUs(t *testing.T, c request, processes int, o drivertest.Options, how func(testing.TB, request) outcome) outcome {
	t.Helper()
	leader, others, _, end := joinedGPUs(t, &c, processes, o, nccltest.Options{Looks: 2})
	ends := make(chan error)
	for _, j := range others {
		go func() {
			_, err := work(context.Background(), j, nil, c.cuda)
			ends <- err
		}()
	}
	c.Config = c.Config.Over(leader)
	got := how(t, c)
	for range others {
		require.NoError(t, <-ends)
	}
	end()
	return got
}

// TestNCCLGivesTheSameBits compares jobs over processes, GPUs and NCCL with the CPU's ranks in one
// process. The bits must be equal at every stage, in groups, with one or several ranks per process,
// and with states on host or disk. runOf also checks that touched memory equals the plan.
func TestNCCLGivesTheSameBits(t *testing.T) {
	for turn, c := range []struct {
		processes, each int
		change          func(*request)
	}{
		{2, 1, func(c *request) { c.Zero, c.Clip = 0, 1 }},
		{3, 1, func(c *request) { c.Zero, c.Recompute = 1, "full" }},
		{2, 1, func(c *request) { c.Zero, c.Accum, c.Reproducible = 2, 2, true }},
		{3, 1, func(c *request) { c.Zero, c.Recompute = 3, "selective" }},
		{4, 1, func(c *request) { c.Zero, c.ShardSize, c.Clip = 3, 2, 1 }},
		{2, 1, func(c *request) { c.Zero, c.Disk, c.Offload = 3, t.TempDir(), "optimizer=disk,activations=host" }},
		{2, 2, func(c *request) { c.Zero, c.ShardSize, c.Clip = 3, 2, 1 }},
		{2, 3, func(c *request) { c.Zero, c.Accum, c.Reproducible = 2, 2, true }},
	} {
		if !long.On() && (turn == 1 || turn == 2 || turn == 6) { // other cases cover these stages
			continue
		}
		cfg := tiny("gpt2")
		cfg.Batch, cfg.Seq, cfg.Steps, cfg.Dropout = 1, 16, 2, 0.1
		c.change(&cfg)
		how := runOf
		if cfg.ShardSize > 0 {
			how = runMesh
		}
		one := cfg
		one.Ranks, cfg.LocalRanks = c.processes*c.each, c.each
		want := how(t, one)
		got := overGPUs(t, cfg, c.processes, drivertest.Options{Seed: uint64(turn % 3)}, how)
		at := fmt.Sprintf("turn %d", turn)
		require.Equal(t, want.losses, got.losses, at)
		require.Equal(t, want.sha, got.sha, at)
	}
}

// TestNCCLErrorEndsTheJob checks that an NCCL error ends the job in every process within the
// timeout.
func TestNCCLErrorEndsTheJob(t *testing.T) {
	for _, each := range []int{1, 2} {
		ncclErrorEnds(t, each)
	}
}

func ncclErrorEnds(t *testing.T, each int) {
	c := tiny("gpt2")
	c.Batch, c.Seq, c.Steps, c.Timeout, c.LocalRanks = 1, 16, 50, 20*time.Second, each
	leader, others, fabric, end := joinedGPUs(t, &c, 2, drivertest.Options{}, nccltest.Options{})
	ends := make(chan error)
	go func() {
		_, err := work(context.Background(), others[0], nil, c.cuda)
		ends <- err
	}()
	c.Config = c.Config.Over(leader)
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	err = tr.Run(context.Background(), func(r StepResult) error {
		if r.Step == 1 {
			fabric.Break(1, nccl.RemoteError, 0)
		}
		return nil
	})
	require.ErrorContains(t, err, "rank 1")
	require.ErrorContains(t, err, "as told (6)")
	_ = tr.Close() // it has nothing to add
	<-ends
	end()
}

// TestNCCLOneOfAProcessCantOpen makes the opening of one rank fail. The other ranks of its process,
// which wait for it, and the job must end.
func TestNCCLOneOfAProcessCantOpen(t *testing.T) {
	for _, call := range []string{"ncclCommInitRankConfig", "ncclCommSplit"} {
		c := tiny("gpt2")
		c.Batch, c.Seq, c.Steps, c.LocalRanks, c.ShardSize = 1, 16, 1, 2, 2
		leader, others, fabric, end := joinedGPUs(t, &c, 2, drivertest.Options{}, nccltest.Options{})
		fabric.Fail(call, 4, 3)
		ends := make(chan error)
		go func() {
			_, err := work(context.Background(), others[0], nil, c.cuda)
			ends <- err
		}()
		c.Config = c.Config.Over(leader)
		_, err := c.start(context.Background())
		require.ErrorContains(t, err, "as told (3)", call)
		<-ends
		end()
	}
}

// aloneWithNCCL starts processes that can communicate only over NCCL. end closes them.
func aloneWithNCCL(t testing.TB, c *request, processes int) (jobs []*job.Job, fabric *nccltest.Fabric, end func()) {
	t.Helper()
	d := onDouble(t, c, drivertest.Options{Devices: processes}, false)
	fabric = nccltest.New(d, nccltest.Options{Root: true})
	c.cuda.NCCL = func() (nccl.API, error) { return fabric.Library(22105), nil }
	jobs = make([]*job.Job, processes)
	hosts := make([]*nccl.Host, processes)
	var wg sync.WaitGroup
	for i := range processes {
		wg.Go(func() {
			h, err := gpu.StartNCCL(i, processes, i, false, c.cuda)
			if err != nil {
				t.Error(err)
				return
			}
			hosts[i] = h
			jobs[i] = &job.Job{Process: i, Processes: processes, Locals: processes, Local: i, Transport: gpu.OverNCCL{Host: h}}
			for peer := range processes {
				if peer != i && (i == 0 || peer == 0) {
					jobs[i].Links = append(jobs[i].Links, run.NewLink(peer, h.Stream(peer)))
				}
			}
		})
	}
	wg.Wait()
	return jobs, fabric, func() {
		for _, h := range hosts {
			wg.Go(func() { require.NoError(t, h.Close()) })
		}
		wg.Wait()
		require.NoError(t, fabric.Close())
		require.NoError(t, d.Close())
	}
}

// TestNCCLAlone checks jobs that have only the environment variables of torchrun or an indexed
// Kubernetes Job. Plan, decisions and heartbeats then use NCCL too. Bits, checkpoints and
// evaluation must be the same.
func TestNCCLAlone(t *testing.T) {
	c := tiny("gpt2")
	c.Batch, c.Seq, c.Steps, c.Zero, c.Clip, c.EvalEvery, c.EvalData, c.EvalSteps = 1, 16, 2, 3, 1, 1, c.Data, 1
	one := c
	one.Ranks, one.Checkpoint = 3, scratch(t)
	want := runOf(t, one)

	c.Checkpoint = scratch(t)
	jobs, _, end := aloneWithNCCL(t, &c, 3)
	ends := make(chan error)
	for _, j := range jobs[1:] {
		go func() {
			_, err := work(context.Background(), j, nil, c.cuda)
			ends <- err
		}()
	}
	c.Config = c.Config.Over(jobs[0])
	got := runOf(t, c)
	for range jobs[1:] {
		require.NoError(t, <-ends)
	}
	end()
	require.Equal(t, want.losses, got.losses)
	require.Equal(t, want.sha, got.sha)
}

// TestNCCLAloneFails checks that an NCCL error in one process ends the job in all.
func TestNCCLAloneFails(t *testing.T) {
	c := tiny("gpt2")
	c.Batch, c.Seq, c.Steps, c.Timeout = 1, 16, 1000, 20*time.Second
	jobs, fabric, end := aloneWithNCCL(t, &c, 2)
	done := make(chan error)
	go func() {
		_, err := work(context.Background(), jobs[1], nil, c.cuda)
		done <- err
	}()
	c.Config = c.Config.Over(jobs[0])
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	err = tr.Run(context.Background(), func(r StepResult) error {
		if r.Step == 1 {
			fabric.Break(1, nccl.RemoteError, 1) // breaks the data communicator, not the one for messages
		}
		return nil
	})
	require.ErrorContains(t, err, "as told (6)")
	_ = tr.Close() // it has nothing to add
	<-done
	end()
}
