package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/internal/published"
)

// Of the held-out rows most lie in the range of their card.
func TestRangesHoldForHeldOutRows(t *testing.T) {
	in, all := 0, 0
	for _, g := range groupsOf(published.Rows(), gpus.Generation) {
		if !g.Calibration {
			in, all = in+g.Within, all+g.N
		}
		require.LessOrEqual(t, g.Least, g.Mean)
		require.LessOrEqual(t, g.Mean, g.Most)
	}
	require.GreaterOrEqual(t, float64(in)/float64(all), 0.8, "%d of %d", in, all)
}
