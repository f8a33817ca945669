package main

import (
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
)

func TestMain(m *testing.M) { os.Exit(ownworld.Run(m)) }

// The chosen order moves at most 5 GB a step again, by the model and by arithmetic: heads
// under way, of each of which half is done, fit the cache.
func TestChosenOrderStaysInTheCache(t *testing.T) {
	again, _ := run(spreadOrder(7), 30e6)
	require.LessOrEqual(t, float64(again)*layers, 5e9)
	underWay := 7 * tiles * tiles * (operands + sums) / 2
	require.LessOrEqual(t, underWay, int(30e6))
	page, err := os.ReadFile("README.md")
	require.NoError(t, err)
	require.Contains(t, string(page), fmt.Sprintf("| next tile 7 heads later (chosen) | 30 MB | %.1f GB |", float64(again)*layers/1e9))
}
