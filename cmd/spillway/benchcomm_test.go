//go:build linux

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/algo"
)

func TestBenchCommHasARowAnAlgorithm(t *testing.T) {
	got := command("bench", "comm", "--ranks", "2", "--max-bytes", "1KiB", "--collectives", "all", "--json", "-")
	require.Zero(t, got.status, got.stderr)
	var rows []commRow
	require.NoError(t, json.Unmarshal([]byte(got.stdout), &rows))
	seen := map[comm.Op]map[algo.Name]bool{}
	for _, r := range rows {
		if seen[r.Op] == nil {
			seen[r.Op] = map[algo.Name]bool{}
		}
		require.False(t, seen[r.Op][r.Algorithm], "two rows of %s by %s", r.Op, r.Algorithm)
		seen[r.Op][r.Algorithm] = true
		require.Positive(t, r.Seconds)
		require.EqualValues(t, 1024, r.Bytes)
	}
	for _, op := range []comm.Op{comm.AllReduce, comm.ReduceScatter, comm.AllGather} {
		require.Len(t, seen[op], len(algo.Names)-1, "%s", op)
	}
	require.Len(t, seen[comm.Broadcast], 1)
	require.Len(t, seen[comm.AllToAll], 1)
	got = command("bench", "comm", "--collectives", "direct,rings")
	require.Equal(t, 1, got.status)
	require.Contains(t, got.stderr, `--collectives "rings": want auto, direct`)
}

// Over MPI the library's own collectives run beside ours.
func TestBenchCommOverMPIHasAPeer(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	for _, launcher := range []string{"mpirun.openmpi", "mpirun.mpich"} {
		file := filepath.Join(t.TempDir(), "rows.json")
		p := mpirun(t, launcher, 2, "bench", "comm", "--max-bytes", "1KiB", "--json", file)
		require.Zero(t, p.end(t), p.errs.String())
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		var rows []commRow
		require.NoError(t, json.Unmarshal(text, &rows))
		require.Len(t, rows, 5)
		for _, r := range rows {
			require.Positive(t, r.Peer, "%s by %s", r.Op, launcher)
		}
	}
}
