package search

import (
	"context"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/recompute"
)

// autoencoder returns a job whose model has two units, "enc" and "dec", and no repeated block.
func autoencoder() *job {
	return &job{build: func(sh Shape) (*graph.Program, error) {
		const vocab, width, inner = 64, 32, 512
		b := graph.NewBuilder()
		normal := graph.Normal(0.02)
		b.Unit("enc")
		x := b.Embed("enc.embed", b.Tokens(int64(sh.Batch), int64(sh.Seq)), b.Param("enc.table", normal, vocab, width))
		x = b.Activation("enc.act", b.Linear("enc.up", x, b.Param("enc.up.weight", normal, inner, width), graph.Value{}, graph.LinearAttr{TransW: true}), graph.ActGELUTanh)
		x = b.Linear("enc.down", x, b.Param("enc.down.weight", normal, width, inner), graph.Value{}, graph.LinearAttr{TransW: true})
		b.Unit("dec")
		x = b.Activation("dec.act", b.Linear("dec.up", x, b.Param("dec.up.weight", normal, inner, width), graph.Value{}, graph.LinearAttr{TransW: true}), graph.ActGELUTanh)
		x = b.Linear("dec.down", x, b.Param("dec.down.weight", normal, width, inner), graph.Value{}, graph.LinearAttr{TransW: true})
		b.HeadLoss("loss", x, b.Param("dec.head.weight", normal, vocab, width), b.Targets(int64(sh.Batch), int64(sh.Seq)))
		return b.Program()
	}}
}

// The search finds the buffers that can be recomputed or parked in the program itself. It therefore
// also works on a model with arbitrary unit names and no repeated block.
func TestBlocksComeFromTheProgram(t *testing.T) {
	s := autoencoder().spec(1, 8, 128)
	hw := CPUHardware(2)
	free, err := Predict(t.Context(), s, hw.Machine(1))
	require.NoError(t, err)
	s.Capacity[graph.Device] = free.Plan.Layout.Spaces[graph.Device].Peak * 3 / 4
	s.Auto = true
	f, err := Predict(t.Context(), s, hw.Machine(1))
	require.NoError(t, err)
	require.True(t, f.Fits())
	require.Equal(t, Some, f.Chosen.Outcome)
	require.NotEmpty(t, f.Spec.Recompute.Drop)
	for _, name := range f.Spec.Recompute.Drop {
		require.Regexp(t, `^(enc|dec)\.`, name)
	}
	again, err := recompute.Parse(f.Spec.Recompute.String())
	require.NoError(t, err)
	require.Equal(t, again, f.Spec.Recompute)
	s.Auto = false
	fitted, err := Fit(t.Context(), s, Given{}, nil, 0, hw)
	require.NoError(t, err)
	require.True(t, fitted.Fits())
	asked, err := Predict(t.Context(), s, hw.Machine(1))
	require.NoError(t, err)
	require.False(t, asked.Fits())
	ways, _ := WaysOut(t.Context(), asked, hw)
	require.True(t, slices.ContainsFunc(ways, func(w Way) bool {
		return slices.ContainsFunc(w.Changes, func(c Change) bool { return c.Field == Recompute })
	}), "%v", ways)
}

// A search with a canceled context returns the context's error and evaluates no more plans.
func TestSearchesAreCanceled(t *testing.T) {
	s := gpt2(2, 64).spec(2, 4, 64)
	s.Capacity[graph.Device] = 1 << 20
	hw := CPUHardware(2)
	asked, err := Predict(t.Context(), s, hw.Machine(2))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = Fit(ctx, s, Given{}, nil, 0, hw)
	require.ErrorIs(t, err, context.Canceled)
	s.Auto = true
	_, err = Predict(ctx, s, hw.Machine(2))
	require.ErrorIs(t, err, context.Canceled)
	_, err = Choose(ctx, s, hw.Machine(2))
	require.ErrorIs(t, err, context.Canceled)
	ways, no := WaysOut(ctx, asked, hw)
	require.Empty(t, ways)
	require.NotNil(t, no)
}

// WaysOut without hardware predicts times on the machine of the requested plan.
func TestWaysOutWithoutAMachine(t *testing.T) {
	s := gpt2(1, 64).spec(1, 4, 64)
	hw := CPUHardware(1)
	asked, err := Predict(t.Context(), s, hw.Machine(1))
	require.NoError(t, err)
	s.Capacity[graph.Device] = asked.Plan.Layout.Spaces[graph.Device].Peak * 3 / 4
	asked, err = Predict(t.Context(), s, hw.Machine(1))
	require.NoError(t, err)
	ways, _ := WaysOut(t.Context(), asked, Hardware{})
	require.NotEmpty(t, ways)
}

// Auto keeps one kind of buffers where full recomputation does not fit. Recomputing a norm's inputs
// needs more memory at the peak than storing the norm's output, so full recomputation is not always
// the smallest.
func TestAutoKeepsOneKindWhereThatNeedsLess(t *testing.T) {
	s := gpt2(4, 128).spec(1, 4, 256)
	s.Stage = 0
	m := CPUHardware(2).Machine(1)
	choose := func(limit int64) (*Chosen, *Forecast) {
		s.Capacity[graph.Device] = limit
		c, f, err := chooseRecompute(t.Context(), s, m)
		require.NoError(t, err)
		return c, f
	}
	full := s
	full.Recompute = policyOf(recompute.Full)
	all, err := predict(t.Context(), full, m, 0, early)
	require.NoError(t, err)
	require.Greater(t, all.Plan.Layout.Spaces[graph.Device].Peak, int64(24e6))
	c, f := choose(24e6)
	require.Equal(t, Some, c.Outcome)
	require.NoError(t, f.Plan.Fit())
	c, f = choose(23e6)
	require.Equal(t, NotEnough, c.Outcome)
	require.Nil(t, f)
}
