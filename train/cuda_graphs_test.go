//go:build linux

package train

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/train/saving"
)

// TestCUDAGraphsGiveTheSameBits checks that steps launched as CUDA graphs give the same bits as
// steps launched one operation at a time. Values that change per step must be read from memory, not
// from launch arguments: rate, step count, loss scale, dropout counters and tokens.
func TestCUDAGraphsGiveTheSameBits(t *testing.T) {
	t.Parallel()
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
		c := smallest(t)
		c.Steps = long.Or(5, 6)
		c.LRSchedule, c.Warmup, c.Clip, c.Dropout = "cosine", 2, 1, 0.1
		sameWithGraphs(t, c, true)
	})
	t.Run("the GPU's kernels, skipped steps", func(t *testing.T) {
		c := smallest(t)
		c.Precision = "fp16"
		overflowsInGraphs(t, c, true)
	})
	t.Run("skipped steps", func(t *testing.T) {
		c := tiny("gpt2")
		c.Ranks, c.Batch, c.Seq, c.Accum, c.Precision = 2, 1, 16, 2, "fp16"
		overflowsInGraphs(t, c, false)
	})
}

// smallest returns a run small enough for emulated kernels that has all parts of a step: one layer,
// two ranks, stage 3.
func smallest(t *testing.T) request {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"),
		[]byte(`{"model_type":"gpt2","n_layer":1,"n_head":2,"n_embd":16,"vocab_size":32,"n_positions":4}`), 0o600))
	var text []byte
	for i := range 256 {
		text = binary.LittleEndian.AppendUint16(text, uint16(i*i*7%32))
	}
	data := filepath.Join(dir, "tokens.bin")
	require.NoError(t, os.WriteFile(data, text, 0o600))
	c := tiny("gpt2")
	c.Model, c.Init, c.Data = dir, "random", data
	c.Ranks, c.Batch, c.Seq, c.Zero = 2, 1, 4, 3
	return c
}

// overflowsInGraphs checks that steps that overflow change only the loss scale, before and after
// the graphs exist. Results must equal those without graphs.
func overflowsInGraphs(t *testing.T, c request, own bool) {
	const steps = 10
	c.Steps = steps
	run := func(mode string) (list []StepResult, sha string, calls map[string]int) {
		one := c
		one.CUDAGraphs = mode
		one.Warn = func(line string) { require.NotContains(t, line, "graphs") }
		d := onDouble(t, &one, drivertest.Options{Seed: 5}, own)
		tr, err := one.start(t.Context())
		require.NoError(t, err)
		require.NoError(t, tr.startScale(&saving.Scale{Scale: 1 << 22}))
		sha, err = tr.ParamsSHA256()
		require.NoError(t, err)
		for range steps {
			r, err := tr.Step(t.Context())
			require.NoError(t, err)
			after, err := tr.ParamsSHA256()
			require.NoError(t, err)
			require.Equal(t, r.Skipped, after == sha, "step %d", r.Step)
			sha = after
			list = append(list, StepResult{Loss: r.Loss, Skipped: r.Skipped, SkippedAll: r.SkippedAll, LossScale: r.LossScale})
		}
		require.NoError(t, tr.Close())
		require.NoError(t, d.Close())
		return list, sha, d.Calls()
	}
	want, wantSHA, without := run("off")
	got, gotSHA, with := run("auto")
	require.Equal(t, want, got)
	require.Equal(t, wantSHA, gotSHA)
	require.True(t, want[3].Skipped, "a graph is launched from the second step on")
	require.False(t, want[steps-1].Skipped)
	require.Zero(t, without["cuGraphLaunch"])
	require.Positive(t, with["cuGraphLaunch"])
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

// TestCUDAGraphsRefusedByTheDriver makes the driver refuse capture. The run must warn once and
// continue without graphs. The device line must say whether graphs are used and, if not, why.
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

// TestCUDAGraphThatFails checks that the error of a failed graph names the graph and its phase, and
// says how to find the operation.
func TestCUDAGraphThatFails(t *testing.T) {
	c := tiny("gpt2")
	c.Ranks, c.Steps, c.Batch, c.Seq = 1, 3, 1, 16
	calls := func(d *drivertest.Driver) (ran int, err error) {
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		err = tr.Run(context.Background(), nil)
		_ = tr.Close() // its error repeats the run's
		return d.Calls()["run"], err
	}
	d := onDouble(t, &c, drivertest.Options{}, false)
	ran, err := calls(d)
	require.NoError(t, err)
	require.NoError(t, d.Close())
	// Streams run concurrently, so the run calls that belong to a graph differ between runs.
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
