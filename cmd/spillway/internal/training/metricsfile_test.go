//go:build linux

package training

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
)

func TestMetricsOutputsFailOnceAndTheRunGoesOn(t *testing.T) {
	board, err := openBoard(t.TempDir(), -1)
	require.NoError(t, err)
	require.NoError(t, board.close())
	var said []string
	m := &metricsOut{warn: func(s string) { said = append(said, s) }, board: board, told: map[string]bool{}}
	m.step(spillway.StepResult{Step: 1})
	m.step(spillway.StepResult{Step: 2})
	require.Len(t, said, 1)
	require.Contains(t, said[0], "--tensorboard")
	require.Contains(t, said[0], "the run goes on")
}
