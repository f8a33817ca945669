//go:build linux

package train

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/drivertest"
)

// A step launched as CUDA graphs gives the bits of one launched an operation at a time: what
// changes from step to step (the rate, the step count, the loss scale, dropout's
// counters, the tokens) is read in memory and not in a launch's arguments.
func TestCUDAGraphsGiveTheSameBits(t *testing.T) {
	for name, change := range map[string]func(c *request){
		"fp16": func(c *request) { c.Precision, c.Steps = "fp16", 5 },
		"offload and accumulation": func(c *request) {
			c.Accum, c.Offload, c.Recompute, c.Prefetch = 3, "optimizer=host,activations=host", "selective", 1
		},
		"two ranks, skipping": func(c *request) { c.Ranks, c.Accum, c.OnNonFinite = 2, 2, "skip" },
		"llama in layer order": func(c *request) {
			c.Model, c.Init, c.Accum, c.AccumOrder, c.Dropout = "../testdata/llama-untied", "../testdata/llama-untied", 3, "layer", 0
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := tiny("gpt2")
			c.Ranks, c.Steps, c.Batch, c.Seq, c.Clip, c.Zero, c.Dropout = 1, 4, 1, 16, 1, 2, 0.1
			c.LRSchedule, c.Warmup = "cosine", 2
			change(&c)
			sameWithGraphs(t, c, false)
		})
	}
	t.Run("the GPU's kernels", func(t *testing.T) {
		if os.Getenv(allVariable) == "" {
			t.Skip("half a minute of emulated kernels: " + allVariable + "=1 has it")
		}
		c := tiny("gpt2")
		c.Ranks, c.Steps, c.Batch, c.Seq, c.Clip, c.Dropout, c.Accum = 1, 4, 1, 8, 1, 0.1, 2
		c.LRSchedule, c.Warmup = "cosine", 2
		sameWithGraphs(t, c, true)
	})
}

func sameWithGraphs(t *testing.T, c request, own bool) {
	run := func(mode string) (got outcome, calls map[string]int) {
		one := c
		one.CUDAGraphs = mode
		one.Warn = func(line string) { require.NotContains(t, line, "graphs") }
		d := onDouble(t, &one, drivertest.Options{Seed: 3}, own)
		got = runOf(t, one)
		require.NoError(t, d.Close())
		return got, d.Calls()
	}
	want, without := run("off")
	got, with := run("auto")
	require.Equal(t, want.losses, got.losses)
	require.Equal(t, want.sha, got.sha)
	require.Zero(t, without["cuGraphLaunch"])
	require.Positive(t, with["cuGraphLaunch"])
	require.Less(t, with["Run"]+with["cuLaunchKernel"], without["Run"]+without["cuLaunchKernel"]*4/5, "operations are enqueued in two steps only")
	require.Equal(t, with["cuGraphInstantiateWithFlags"], with["cuGraphExecDestroy"])
}

// Where the driver refuses to capture the run says so once and goes on an operation at a
// time; a trace has no graphs, and the device's line says why.
func TestCUDAGraphsRefusedByTheDriver(t *testing.T) {
	c := tiny("gpt2")
	c.Ranks, c.Steps, c.Batch, c.Seq = 2, 3, 1, 16
	want := runOf(t, c)
	for _, call := range []string{"cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags"} {
		one := c
		var mu sync.Mutex
		var warned []string
		one.Warn = func(line string) {
			mu.Lock()
			defer mu.Unlock()
			warned = append(warned, line)
		}
		d := onDouble(t, &one, drivertest.Options{}, false)
		for n := range 20 {
			d.Fail(call, n+1, 999)
		}
		got := runOf(t, one)
		require.NoError(t, d.Close())
		require.Equal(t, want.losses, got.losses)
		require.Equal(t, want.sha, got.sha)
		require.Len(t, warned, 1)
		require.Contains(t, warned[0], "the run goes on without CUDA graphs")
		require.Contains(t, warned[0], fmt.Sprintf("%s: CUDA_ERROR_UNKNOWN (999)", call))
	}
	for mode, says := range map[string]string{"auto": "; CUDA graphs from the second step on", "off": "; no CUDA graphs: Config.CUDAGraphs off"} {
		one := c
		one.CUDAGraphs = mode
		d := onDouble(t, &one, drivertest.Options{}, false)
		tr, err := one.start(context.Background())
		require.NoError(t, err)
		require.Contains(t, tr.Device(), says)
		require.NoError(t, tr.Close())
		require.NoError(t, d.Close())
	}
	c.CUDAGraphs = "on"
	require.ErrorContains(t, c.Validate(), "Config.CUDAGraphs")
}

// What fails in a graph names the graph, its phase and what would name the operation.
func TestCUDAGraphThatFails(t *testing.T) {
	c := tiny("gpt2")
	c.Ranks, c.Steps, c.Batch, c.Seq = 1, 3, 1, 16
	calls := func(d *drivertest.Driver) (ran int, err error) {
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		err = tr.Run(context.Background(), nil)
		_ = tr.Close() // its error is the run's
		return d.Calls()["run"], err
	}
	d := onDouble(t, &c, drivertest.Options{}, false)
	ran, err := calls(d)
	require.NoError(t, err)
	require.NoError(t, d.Close())
	// Streams run beside each other: which run is of a graph differs from time to time.
	for at := ran * 3 / 4; at < ran; at++ {
		d = onDouble(t, &c, drivertest.Options{}, false)
		d.FailRun(at, 719)
		_, err = calls(d)
		require.NoError(t, d.Close())
		require.ErrorContains(t, err, "CUDA_ERROR_LAUNCH_FAILED (719)")
		if strings.Contains(err.Error(), "operations in a CUDA graph) on stream compute") {
			break
		}
	}
	require.ErrorContains(t, err, "operations in a CUDA graph) on stream compute")
	require.ErrorContains(t, err, "a run without CUDA graphs names it")
	require.ErrorContains(t, err, "step 3")
}
