//go:build linux

package processes

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/bench"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/algo"
	"github.com/spillway-ml/spillway/comm/algorithm"
	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
)

func TestBenchCommHasARowAnAlgorithm(t *testing.T) {
	got := command("bench", "comm", "--ranks", "2", "--max-bytes", "1KiB", "--collectives", "all", "--json", "-")
	require.Zero(t, got.status, got.stderr)
	var rows []bench.CommRow
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
		require.Len(t, seen[op], len(algorithm.Names)-1, "%s", op)
	}
	require.Len(t, seen[comm.Broadcast], 1)
	require.Len(t, seen[comm.AllToAll], 1)
	got = command("bench", "comm", "--collectives", "direct,rings")
	require.Equal(t, 1, got.status)
	require.Contains(t, got.stderr, `--collectives "rings": want auto, direct`)
	got = command("bench", "comm", "--operation", "gather")
	require.Equal(t, 1, got.status)
	require.Contains(t, got.stderr, `--operation "gather": want all_reduce, `)
}

// plan predicts times with the measurements of bench comm for that transport.
func TestBenchCommKeepsLinksForPlan(t *testing.T) {
	config := t.TempDir()
	ownworld.Config(t, config)
	asked := []string{"plan", "--model", testdata + "/gpt2", "--ranks", "2", "--batch", "1", "--seq", "16", "--effort", "20"}
	words := func(args ...string) string {
		got := command(append(asked, args...)...)
		require.Zero(t, got.status, got.stderr)
		return strings.Join(strings.Fields(got.stdout), " ")
	}
	require.Contains(t, words("--transport", "shm"), "collectives as in one process, until spillway launch -n N -- bench comm has measured them")
	require.NotContains(t, words(), "; collectives")
	got := command("bench", "comm", "--ranks", "2", "--max-bytes", "1KiB")
	require.Zero(t, got.status, got.stderr)
	require.Contains(t, got.stderr, "not kept for plans: that takes two ranks or more, all operations, each by an algorithm that auto takes there (--collectives direct, or all), and buffers up to 1MiB at least")
	got = command("bench", "comm", "--ranks", "2", "--max-bytes", "1MiB", "--operation", "all_reduce")
	require.Zero(t, got.status, got.stderr)
	require.Contains(t, got.stderr, "not kept for plans")
	require.NotContains(t, got.stdout, "all_gather")
	got = command("bench", "comm", "--ranks", "2", "--max-bytes", "1MiB")
	require.Zero(t, got.status, got.stderr)
	require.Contains(t, got.stderr, "kept for plan --transport inproc and train --fit in "+config)
	require.Contains(t, words(), "; collectives as measured over inproc between 2 ranks, ")
	require.Contains(t, words("--transport", "SHM"), "collectives as in one process")
	got = command(tinyWith("--ranks", "2", "--steps", "1", "--fit")...)
	require.Zero(t, got.status, got.stderr)
	require.Contains(t, unwrapped(got.stderr), "times are predicted (CPU: rates of a typical server core; spillway plan --calibrate measures this machine; collectives as measured over inproc between 2 ranks, ")

	p := start(t, launched(2, "bench", "comm", "--max-bytes", "1MiB")...)
	require.Zero(t, p.end(t), p.errs.String())
	require.Contains(t, words("--transport", "shm"), "; collectives as measured over shm between 2 ranks, ")
	for _, c := range [][]string{{"--transport", "tcp", `"tcp": want inproc, shm or mpi`}, {"--transport", "mpi", "--gpu", "v100-16", "leave it out with --gpu"}} {
		got := command(append(asked, c[:len(c)-1]...)...)
		require.Equal(t, 1, got.status)
		require.Contains(t, got.stderr, c[len(c)-1])
	}
}

// Buffers without an element for each rank, or too large for the machine's memory, are rejected
// before any allocation. Numbers of ranks that do not divide a buffer are supported.
func TestBenchCommRefusesBuffers(t *testing.T) {
	ownworld.Config(t, t.TempDir())
	for _, c := range []struct {
		args   string
		status int
		want   string
	}{
		{"--ranks 300 --max-bytes 2KiB", cli.ExitBadInput, "--max-bytes 2048: at least 4096, with 4 bytes or more of each rank"},
		{"--max-bytes 1000", cli.ExitBadInput, "--max-bytes 1000: at least 1024"},
		{"--ranks 3 --max-bytes 4EiB", cli.ExitDoesNotFit, "does not fit: 3 ranks on this machine plan "},
		{"--ranks 1024 --max-bytes 900TiB", cli.ExitDoesNotFit, "two buffers of --max-bytes for each; "},
		{"--ranks-per-process 3 --ranks 2", cli.ExitBadInput, "--ranks 2 with --ranks-per-process 3: one process runs all ranks here"},
		{"--timeout -1s", cli.ExitBadInput, "--timeout -1s: a positive duration is needed"},
	} {
		got := command(append([]string{"bench", "comm"}, strings.Fields(c.args)...)...)
		require.Equal(t, c.status, got.status, "%s: %s", c.args, got.stderr)
		require.Contains(t, got.stderr, c.want)
	}
	got := command("bench", "comm", "--ranks-per-process", "300", "--max-bytes", "4KiB", "--operation", "all_gather", "--json", "-")
	require.Zero(t, got.status, got.stderr)
	var rows []bench.CommRow
	require.NoError(t, json.Unmarshal([]byte(got.stdout), &rows))
	require.Len(t, rows, 1, "none of nothing")
	require.EqualValues(t, 3600, rows[0].Bytes)
	require.Equal(t, 300, rows[0].Ranks)

	row := func(op comm.Op) bench.CommRow {
		return bench.CommRow{Transport: "inproc", Ranks: 3, Op: op, Algorithm: algo.Direct, Bytes: 1<<20 - 4, Seconds: 1}
	}
	require.Contains(t, bench.KeepLinks([]bench.CommRow{row(comm.AllReduce), row(comm.ReduceScatter), row(comm.AllGather), row(comm.AllToAll)}), "kept for plan --transport inproc ")
}

func TestBenchCommRefusesMessagesWithoutMPI(t *testing.T) {
	got := command("bench", "comm", "--messages")
	require.Equal(t, 1, got.status)
	require.Contains(t, got.stderr, "--messages with transport inproc: only MPI has both: mpirun -np N spillway bench comm")
}

// Over MPI, bench comm also measures the collectives of the MPI library.
func TestBenchCommOverMPIHasAPeer(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts processes")
	}
	for _, launcher := range []string{"mpirun.openmpi", "mpirun.mpich"} {
		file := filepath.Join(t.TempDir(), "rows.json")
		args := []string{"bench", "comm", "--max-bytes", "1KiB", "--json", file}
		if launcher == "mpirun.mpich" {
			args = append(args, "--messages")
		}
		p := mpirun(t, launcher, 2, args...)
		require.Zero(t, p.end(t), p.errs.String())
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		var rows []bench.CommRow
		require.NoError(t, json.Unmarshal(text, &rows))
		require.Len(t, rows, 5)
		for _, r := range rows {
			require.Positive(t, r.Peer, "%s by %s", r.Op, launcher)
		}
	}
}
