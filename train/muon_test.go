package train

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/plan"
)

// muonOf returns a short run with Muon.
func muonOf(change func(c *request)) request {
	c := tiny("gpt2")
	c.Steps, c.Optimizer, c.LR = 3, "muon", 1e-2
	change(&c)
	return c
}

// TestMuonFollowsPyTorch compares the losses with a plain Muon in PyTorch (testdata/muon.py).
func TestMuonFollowsPyTorch(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../testdata/muon.json")
	require.NoError(t, err)
	var ref struct {
		Cases []struct {
			Model  string
			LR     float64
			Losses []float64
		}
	}
	require.NoError(t, json.Unmarshal(text, &ref))
	require.Len(t, ref.Cases, 6)
	for _, r := range ref.Cases {
		c := tiny(r.Model)
		c.Optimizer, c.LR, c.Ranks, c.Batch = "muon", r.LR, 2, 1
		got := runOf(t, c)
		require.Len(t, r.Losses, 20)
		for k, want := range r.Losses {
			require.InDelta(t, want, float64(got.losses[k]), 1e-4, "%s, rate %g, step %d", r.Model, r.LR, k+1)
		}
	}
}

// TestMuonHasOneResult checks that stage, placement, transfers and recomputation do not change
// Muon's bits. runOf checks that touched memory equals the plan. By default half of the cases run.
func TestMuonHasOneResult(t *testing.T) {
	t.Parallel()
	for _, ranks := range []int{2, 3} {
		for name, base := range map[string]func(c *request){
			"clipped": func(c *request) { c.Clip = 0.5 },
			"bf16":    func(c *request) { c.Precision = "bf16" },
			"llama":   func(c *request) { c.Model, c.Init = "../testdata/llama-untied", "../testdata/llama-untied" },
		} {
			first := muonOf(base)
			first.Ranks, first.Zero = ranks, 0
			want := runOf(t, first)
			for i, change := range []func(c *request){
				func(c *request) { c.Zero = 1 }, func(c *request) { c.Zero = 2 }, func(c *request) { c.Zero = 3 },
				func(c *request) { c.Zero, c.Offload, c.offloadChunk = 1, "optimizer=host", 2048 },
				func(c *request) {
					c.Zero, c.Offload, c.Recompute = 3, "optimizer=host,parameters=host,gradients=host", "full"
				},
				func(c *request) { c.Zero, c.Offload, c.Disk = 2, "optimizer=disk", scratch(t) },
				func(c *request) { c.Zero, c.Threads, c.Prefetch = 3, 3, 2 },
			} {
				at := fmt.Sprintf("%s, %d ranks, %d", name, ranks, i)
				if !long.Keep(at, 2) {
					continue
				}
				c := muonOf(base)
				c.Ranks = ranks
				change(&c)
				got := runOf(t, c)
				require.Equal(t, want.losses, got.losses, at)
				require.Equal(t, want.sha, got.sha, at)
			}
		}
	}
}

// TestMuonAtAnyNumberOfRanks checks that with Reproducible the number of ranks does not change the
// bits. A checkpoint of one number of ranks resumes at another.
func TestMuonAtAnyNumberOfRanks(t *testing.T) {
	t.Parallel()
	at := func(ranks, zero int) request {
		return muonOf(func(c *request) {
			c.Reproducible, c.Batch, c.GlobalBatch, c.Ranks, c.Zero = true, 1, 4, ranks, zero
			c.Steps = 4
		})
	}
	want := runOf(t, at(1, 0))
	for ranks := 2; ranks <= 4; ranks++ {
		c := at(ranks, ranks-1)
		c.Checkpoint = scratch(t)
		got := runOf(t, c)
		require.Equal(t, want.losses, got.losses, "%d ranks", ranks)
		require.Equal(t, want.sha, got.sha, "%d ranks", ranks)
		on := at(5-ranks, 2)
		on.Checkpoint, on.Resume, on.Steps = c.Checkpoint, true, 6
		whole := at(1, 0)
		whole.Steps = 6
		all := runOf(t, whole)
		after := runOf(t, on)
		require.Equal(t, all.losses[4:], after.losses, "%d ranks after %d", on.Ranks, ranks)
		require.Equal(t, all.sha, after.sha, "%d ranks after %d", on.Ranks, ranks)
	}
}

// TestMuonsOwners checks that each matrix of a block is updated completely by one rank. No rank's
// work may exceed an even share by more than the largest matrix. Vectors, embeddings and heads use
// AdamW.
func TestMuonsOwners(t *testing.T) {
	t.Parallel()
	c := muonOf(func(c *request) { c.Model, c.Init, c.Ranks = "../testdata/llama-untied", "../testdata/llama-untied", 3 })
	runPlanned(t, c, func(p *plan.Plan) {
		update := p.Program.SectionOf(graph.SectionStep, graph.FormWhole).Update()
		load, largest, seen := map[int][]int64{}, map[int]int64{}, 0
		for k := range update.Ops {
			op := &update.Ops[k]
			a, ok := op.Attr.(graph.NewtonSchulzAttr)
			if !ok {
				continue
			}
			seen++
			shape := p.Program.Buf(op.In[0]).Shape
			n := graph.NewtonSchulzFlops(shape[0], shape[1])
			if load[op.Unit] == nil {
				load[op.Unit] = make([]int64, 3)
			}
			load[op.Unit][a.Owner] += n
			largest[op.Unit] = max(largest[op.Unit], n)
		}
		require.Equal(t, 2*7, seen, "of each layer")
		for u, l := range load {
			require.LessOrEqual(t, max(l[0], l[1], l[2]), (l[0]+l[1]+l[2])/3+largest[u], p.Program.Units[u].Name)
		}
		for i := range p.Program.Units {
			u := &p.Program.Units[i]
			states := fmt.Sprint(len(u.States), u.States[0].Name)
			for _, s := range u.Segments {
				prm := &p.Program.Params[s.Param]
				if len(prm.Shape) == 2 && u.Block.Repeats() {
					require.Equal(t, "1momentum", states, prm.Name)
				} else {
					require.Equal(t, "2exp_avg", states, prm.Name)
				}
			}
		}
	})
}

// TestMuonIsRefusedByName checks that unsupported settings are refused at the start, and that the
// error names the setting and muon. GPUs have no Muon kernels, and its states have no 8-bit or
// 16-bit form.
func TestMuonIsRefusedByName(t *testing.T) {
	for field, change := range map[string]func(c *request){
		"Config.Device cuda":         func(c *request) { c.Device = "cuda" },
		"Config.Int8 optimizer":      func(c *request) { c.Int8 = []string{"optimizer"} },
		"Config.OptimizerDType bf16": func(c *request) { c.OptimizerDType, c.StochasticRounding, c.Precision = "bf16", true, "bf16" },
		"Config.Nesterov":            func(c *request) { c.Nesterov = true },
	} {
		_, err := muonOf(change).start(context.Background())
		require.ErrorIs(t, err, ErrConfig)
		require.ErrorContains(t, err, field)
		require.ErrorContains(t, err, "muon")
	}
}

// TestMuonOverUnevenShares checks ranks with different numbers of micro-batches. A rank without one
// in the last round must still update its matrices, with states on the host too.
func TestMuonOverUnevenShares(t *testing.T) {
	t.Parallel()
	c := tiny("gpt2")
	c.Steps, c.Batch, c.Seq, c.Threads, c.GlobalBatch, c.Optimizer = 2, 1, 8, 1, 7, "muon"
	want := curveOf(t, c, 1, nil)
	for _, stage := range []int{2, 3} {
		c.Zero, c.Offload = stage, "optimizer=host"
		require.Equal(t, want, curveOf(t, c, 3, []int{2, 4, 1}), "stage %d", stage)
	}
}
