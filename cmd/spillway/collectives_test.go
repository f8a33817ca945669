package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm/algo"
	"github.com/spillway-ml/spillway/comm/algorithm"
)

// Every algorithm for collectives gives the same bits, except the ring, whose values are close.
func TestCollectivesKeepTheBits(t *testing.T) {
	for _, flags := range []string{"--ranks 4 --zero 3", "--ranks 4 --zero 0 --precision bf16 --accum 2", "--ranks 4 --shard-size 2 --zero 2", "--ranks 3"} {
		want := command(tinyWith(strings.Fields(flags)...)...)
		require.Zero(t, want.status, want.stderr)
		for _, a := range algorithm.Names[1:] {
			got := command(tinyWith(append(strings.Fields(flags), "--collectives", string(a))...)...)
			switch {
			case a == algo.Hierarchical && flags == "--ranks 3":
				require.Equal(t, 1, got.status)
				require.Contains(t, got.stderr, "--collectives hierarchical: needs hosts with a power of two of neighbouring ranks each")
				require.Contains(t, got.stderr, "3 of 3 ranks on a host")
			case a == algo.Ring:
				require.Zero(t, got.status, got.stderr)
				require.Contains(t, got.stderr, "with --collectives ring the last bits may differ")
			default:
				require.Zero(t, got.status, "%s %s: %s", flags, a, got.stderr)
				require.Equal(t, want.stdout, got.stdout, "%s by %s", flags, a)
			}
		}
	}
}

func TestCollectivesAreRefusedByName(t *testing.T) {
	for flags, why := range map[string]string{
		"--collectives rings":               `--collectives "rings": want auto, direct, tree, halving-doubling, hierarchical, ring, server`,
		"--collectives ring --reproducible": "--collectives ring with --reproducible",
		"--collectives tree --device cuda":  "--collectives tree with --device cuda",
	} {
		got := command(tinyWith(strings.Fields(flags)...)...)
		require.Equal(t, 1, got.status)
		require.Contains(t, got.stderr, why)
	}
}
