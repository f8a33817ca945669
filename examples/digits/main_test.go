package main

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
)

func TestMain(m *testing.M) { os.Exit(ownworld.Run(m)) }

// The network reads held-out images that a linear classifier of the same training does not,
// and four ranks that share its states have the losses of four that copy them.
func TestTheNetworkReadsDigitsAtEveryStage(t *testing.T) {
	heard := 0
	hear := func(epoch int, e *spillway.EvalResult) {
		heard++
		require.Equal(t, heard, epoch)
		require.EqualValues(t, heldOut, e.Targets)
	}
	sharded, accuracy, err := train(3, 2, []int{256}, hear)
	require.NoError(t, err)
	require.Equal(t, 2, heard)
	require.GreaterOrEqual(t, accuracy, 0.95)
	heard = 0
	replicated, same, err := train(0, 2, []int{256}, hear)
	require.NoError(t, err)
	require.Equal(t, replicated, sharded)
	require.Equal(t, accuracy, same)

	heard = 0
	_, linear, err := train(0, 4, nil, hear)
	require.NoError(t, err)
	require.LessOrEqual(t, linear, 0.85)
	require.Greater(t, linear, 0.3, "it learns, too")
	t.Logf("the network %.4f, linear %.4f", accuracy, linear)
}
