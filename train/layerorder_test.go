package train

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/planner"
)

// layered returns a short run in layer order.
func layered(model string, ranks int) request {
	c := tiny(model)
	c.Ranks, c.Batch, c.Seq, c.Steps, c.Accum, c.AccumOrder, c.Clip = ranks, 1, 8, 2, 3, config.LayerOrder, 1
	return c
}

// TestLayerOrderGivesMicroOrdersBits checks that layer order gives the losses and bits of micro
// order at stage 0, at every stage and placement. runOf checks that touched memory equals the plan.
func TestLayerOrderGivesMicroOrdersBits(t *testing.T) {
	t.Parallel()
	disk := t.TempDir()
	everything := "optimizer=%[1]s,parameters=%[1]s,gradients=%[1]s,activations=%[1]s"
	cases := []struct {
		ranks, zero int
		change      func(c *request) // applied to both orders
		recompute   string
		offload     string
	}{
		{1, 0, nil, "none", ""},
		{1, 3, func(c *request) { c.Dropout = 0 }, "full", fmt.Sprintf(everything, "disk")},
		{2, 1, func(c *request) { c.Clip = 0 }, "selective", "optimizer=disk,parameters=disk"},
		{2, 3, nil, "full", fmt.Sprintf(everything, "host")},
		{2, 3, func(c *request) { c.Freeze = []string{"model.layers.0.*", "model.embed_tokens.*"} }, "full", "parameters=host"},
		{2, 2, func(c *request) { c.Freeze = []string{"model.layers.0.mlp.*"} }, "none", "activations=host"},
		{3, 2, nil, "none", ""},
		{4, 3, func(c *request) { c.ShardSize = 2 }, "none", "optimizer=host"},
		{5, 3, nil, "drop:model.layers.{0-1}.mlp.*", "activations=host:model.layers.*.self_attn*"},
		{2, 3, func(c *request) { c.Precision = "bf16" }, "none", "gradients=host"},
		{2, 2, func(c *request) { c.Precision, c.Clip = "fp16", 0 }, "full", ""},
		{4, 3, func(c *request) { c.Precision, c.ShardSize = "bf16", 2 }, "none", ""},
		{2, 3, func(c *request) { c.Precision, c.Int8 = "bf16", []string{"activations"} }, "none", "activations=host"},
		{2, 3, func(c *request) {
			c.Precision, c.Int8 = "bf16", []string{"optimizer", "gather", "reduce", "activations", "matmul"}
		}, "selective", ""},
		{3, 3, func(c *request) { c.Reproducible = true }, "full", "optimizer=host"},
		{2, 0, func(c *request) { c.Reproducible = true }, "none", "activations=host"},
		{1, 3, func(c *request) { c.Reproducible, c.Precision = true, "bf16" }, "none", ""},
		{2, 2, func(c *request) { c.Reproducible, c.Precision = true, "bf16" }, "selective", "gradients=host"},
	}
	for i, cs := range cases {
		c := layered("llama-untied", cs.ranks)
		c.poison = i%3 == 0 // verify the program after every pass
		if i%6 == 1 {
			c.Accum = 8
		}
		if cs.change != nil {
			cs.change(&c)
		}
		want := c
		want.AccumOrder, want.Zero = config.MicroOrder, 0
		if want.ShardSize > 0 {
			want.Zero = 1
		}
		c.Zero, c.Recompute, c.Offload, c.Disk = cs.zero, cs.recompute, cs.offload, disk
		a, b := runOf(t, want), runOf(t, c)
		require.Equal(t, a.losses, b.losses, i)
		require.Equal(t, a.sha, b.sha, i)
	}
}

// TestLayerOrderKeepsSamplesApart checks that dropout masks and the frozen-layer cache belong to
// samples, so that layer order does not change them. Evaluation losses must not change either.
func TestLayerOrderKeepsSamplesApart(t *testing.T) {
	t.Parallel()
	eval := func(c request) (list []float32) {
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		defer func() { require.NoError(t, tr.Close()) }()
		require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
			list = append(list, r.Loss, r.Eval.Loss)
			return nil
		}))
		return list
	}
	c := layered("gpt2", 2) // tied, but the frozen embedding has no gradient
	c.Dropout, c.Freeze, c.EvalData, c.EvalEvery, c.EvalSteps, c.Zero = 0.2, []string{"wte*", "wpe*", "h.0.*"}, c.Data, 1, 2, 2
	want := c
	want.AccumOrder, want.Zero = config.MicroOrder, 0
	require.Equal(t, eval(want), eval(c))

	c.Dropout, want.Dropout = 0, 0
	c.FrozenCache, c.Steps, c.Accum = config.FrozenCache{Tier: graph.Host, Bytes: 1 << 20}, 30, 8
	want.Steps, want.Accum = c.Steps, c.Accum
	cached := 0
	tr, err := c.start(context.Background())
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	var got []float32
	require.NoError(t, tr.Run(context.Background(), func(r StepResult) error {
		if got = append(got, r.Loss, r.Eval.Loss); r.Cached {
			cached++
		}
		return nil
	}))
	require.Equal(t, eval(want), got)
	require.Positive(t, cached)
}

// TestLayerOrderOfATiedHead checks a parameter used by two blocks, whose gradient layer order sums
// use by use. The bits must be the same at every stage and placement, and the plan must mention
// this sum.
func TestLayerOrderOfATiedHead(t *testing.T) {
	t.Parallel()
	c := layered("gpt2", 2)
	micro := c
	micro.AccumOrder, micro.Zero = config.MicroOrder, 0
	base := runOf(t, micro)
	var want outcome
	for zero := range 4 {
		c.poison = zero == 3
		c.Zero, c.Recompute, c.Offload = zero, []string{"none", "full"}[zero%2], []string{"", "optimizer=host", "activations=host", "parameters=host"}[zero]
		got := runOf(t, c)
		if zero == 0 {
			want = got
			require.Equal(t, base.losses[0], got.losses[0])
			for i := range got.losses {
				require.InEpsilon(t, base.losses[i], got.losses[i], 1e-5)
			}
		}
		require.Equal(t, want.losses, got.losses, zero)
		require.Equal(t, want.sha, got.sha, zero)
	}
	p, err := c.planned().Plan(t.Context())
	require.NoError(t, err)
	require.Equal(t, "wte.weight is used by several blocks: its gradient is summed use by use, with bits of layer order's own, equal at every stage and placement", p.OwnSums())
	untied := layered("llama-untied", 2)
	p, err = untied.planned().Plan(t.Context())
	require.NoError(t, err)
	require.Empty(t, p.OwnSums())
}

// TestLayerOrderReadsOnce checks that a step of 8 micro-batches in layer order reads, writes and
// sends the same bytes as a step of one.
func TestLayerOrderReadsOnce(t *testing.T) {
	t.Parallel()
	last := func(c request) (r StepResult) {
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		defer func() { require.NoError(t, tr.Close()) }()
		require.NoError(t, tr.Run(context.Background(), func(s StepResult) error { r = s; return nil }))
		return r
	}
	c := layered("llama-untied", 2)
	c.poison, c.Accum = false, 8 // poison's fills would count as writes
	c.Offload, c.Disk, c.Zero = "optimizer=disk,parameters=disk", t.TempDir(), 3
	got := last(c)
	c.Accum = 1
	one := last(c)
	require.Positive(t, one.DiskRead)
	require.Equal(t, one.DiskRead, got.DiskRead)
	require.Equal(t, one.DiskWritten, got.DiskWritten)
	require.Positive(t, one.CommBytes)
	require.Equal(t, one.CommBytes, got.CommBytes)
	c.Accum, c.AccumOrder = 8, config.MicroOrder
	require.Greater(t, last(c).DiskRead, 3*one.DiskRead, "eight times the parameters")
}

// TestFitTakesLayerOrder checks that a search selects layer order, and reports it, if each
// micro-batch would read everything from disk again. A fixed order stays.
func TestFitTakesLayerOrder(t *testing.T) {
	t.Parallel()
	c := layered("llama-untied", 1)
	c.poison, c.AccumOrder, c.Accum = false, config.MicroOrder, 8
	c.Offload, c.Disk = "optimizer=disk,parameters=disk", t.TempDir()
	fit := func(c request, order bool) *planner.Fitted {
		f, err := c.planned().Fit(t.Context(), planner.Fixed{Zero: true, Offload: true, Recompute: true, Prefetch: true, AccumOrder: order}, 0, briefly(2))
		require.NoError(t, err)
		return f
	}
	got := fit(c, false)
	require.Contains(t, got.Choices.String(), "Config.AccumOrder layer ")
	require.Contains(t, strings.Join(got.Reasons, "\n"), "layer order: each layer runs its 8 micro-batches in turn")
	micro := fit(c, true)
	require.NotContains(t, micro.Choices.String(), "Config.AccumOrder")
	require.Greater(t, got.TokensPerSecond(), 1.1*micro.TokensPerSecond())
	c.Reproducible = true
	require.Contains(t, fit(c, false).Choices.String(), "Config.AccumOrder layer ")
	c.Reproducible, c.Accum = false, 33
	require.NotContains(t, fit(c, false).Choices.String(), "Config.AccumOrder", "the program would have them all: over search's 32")
	c.Accum, c.Offload = 8, ""
	require.NotContains(t, fit(c, false).Choices.String(), "Config.AccumOrder", "nothing is read or gathered")
	c.AccumOrder = config.LayerOrder
	require.Contains(t, fit(c, true).Choices.String(), "Config.AccumOrder layer ")
	require.Contains(t, fit(c, false).Choices.String(), "Config.AccumOrder micro ", "what was asked for is told to change")
}

// TestMicroOrderIsAWayOut checks that a refusal proposes micro order if it fits and layer order
// does not.
func TestMicroOrderIsAWayOut(t *testing.T) {
	t.Parallel()
	c := layered("llama-untied", 1)
	c.poison, c.Accum, c.Seq, c.AccumOrder = false, 8, 40, config.MicroOrder
	p, err := c.planned().Plan(t.Context())
	require.NoError(t, err)
	c.DeviceMemory, c.AccumOrder = p.Layout.Spaces[graph.Device].Peak+p.Config.Outside[graph.Device], config.LayerOrder
	_, err = c.planned().Plan(t.Context())
	var refused *planner.Refusal
	require.ErrorAs(t, err, &refused)
	require.Contains(t, err.Error(), "Config.AccumOrder micro")
}
