package main

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/internal/published"
)

// Of the held-out rows most lie in the range of their card, and calibration brings predictions
// nearer to them.
func TestRangesHoldForHeldOutRows(t *testing.T) {
	in, all := 0, 0
	for _, g := range groupsOf(published.Rows(), gpus.Generation) {
		if g.Card != "" {
			in, all = in+g.InRange, all+g.Held
		}
		require.LessOrEqual(t, g.Least, g.Most)
		if g.Held >= 12 {
			require.Less(t, g.Median, g.Raw, "%s on %q", g.Stack, g.Card)
			require.LessOrEqual(t, g.Median, 0.1, "%s on %q", g.Stack, g.Card)
		}
	}
	require.GreaterOrEqual(t, float64(in)/float64(all), 0.8, "%d of %d", in, all)
}

// A row gets a role once, half of each stack and card, and the same ones each time.
func TestDraw(t *testing.T) {
	table := func() [][]string {
		list := [][]string{published.Columns}
		for i := range 7 {
			row := make([]string, len(published.Columns))
			row[1], row[3] = "torch", "a100-80"
			if i >= 5 {
				row[3] = "h100-80"
			}
			list = append(list, row)
		}
		return list
	}
	a, b := table(), table()
	require.True(t, draw(a))
	require.True(t, draw(b))
	require.Equal(t, a, b)
	calibration := map[string]int{}
	for _, row := range a[1:] {
		if row[0] == "calibration" {
			calibration[row[3]]++
		}
	}
	require.Equal(t, map[string]int{"a100-80": 3, "h100-80": 1}, calibration)
	require.False(t, draw(a))
	require.Equal(t, b, a)
}

func TestModelOf(t *testing.T) {
	dir := t.TempDir()
	name, err := modelOf(&published.Row{Model: "llama-2-7b"}, dir)
	require.NoError(t, err)
	require.Equal(t, "llama-2-7b", name)
	for shape, width := range map[string]int{"gpt2:2:64:4:1000": 64, "llama:2:96:4:2:256:1000": 96} {
		name, err := modelOf(&published.Row{Model: shape, Seq: 32}, dir)
		require.NoError(t, err)
		c := spillway.Default()
		c.Model, c.Seq = name, 32
		f, err := spillway.Predict(context.Background(), c, gpus.Usual().Machine(1))
		require.NoError(t, err)
		require.Equal(t, width, f.Shape().Width)
	}
	for _, bad := range []string{"gpt2:2:64", "gpt2:2:x:4:1000", "bert:2:64:4:1000"} {
		_, err := modelOf(&published.Row{Model: bad}, dir)
		require.ErrorContains(t, err, bad)
	}
}
