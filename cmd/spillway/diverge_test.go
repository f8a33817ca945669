package main

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
)

// A divergence ends with status 3 and one line that names the tensor. No checkpoint has states from
// after it.
func TestDivergenceIsAFault(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ck")
	got := command(tinyWith("--steps", "20", "--lr", "1e30", "--save-every", "1", "--checkpoint", dir)...)
	require.Equal(t, cli.ExitFault, got.status, got.stderr)
	last := got.stderr[strings.Index(got.stderr, "spillway: "):]
	require.Contains(t, last, "step 2 is not finite (loss NaN")
	require.Contains(t, last, `first the forward value "h.0.attn.c_attn", by operation only/h.0.attn.c_attn on rank 0, is `)
	require.Equal(t, 1, strings.Count(last, "\n"))
	list, err := filepath.Glob(filepath.Join(dir, "step-*"))
	require.NoError(t, err)
	require.Len(t, list, 1, "only step 1 was finite")

	got = command(tinyWith("--on-nonfinite", "ignore")...)
	require.Equal(t, cli.ExitBadInput, got.status)
	require.Contains(t, got.stderr, `--on-nonfinite "ignore" is not known; use one of stop, skip`)
}

// A skipped step is reported, and its loss in the metrics is null; ten in a row are a fault.
func TestSkippedStepsAreTold(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.jsonl")
	got := command(tinyWith("--metrics", path, "--lr", "1e30", "--steps", "3", "--on-nonfinite", "skip")...)
	require.Equal(t, 0, got.status, got.stderr)
	lines := readLines(t, path)
	require.Len(t, lines, 4)
	require.NotNil(t, lines[0]["loss"])
	require.Equal(t, false, lines[0]["skipped"])
	for _, l := range lines[1:3] {
		require.Contains(t, l, "loss")
		require.Nil(t, l["loss"])
		require.Equal(t, true, l["skipped"])
	}
	require.Contains(t, got.stderr, "warning: step 2 is not finite (loss NaN, gradient norm NaN): its update is skipped")
	require.Contains(t, got.stdout, "skipped: the updates of 2 of 3 steps")

	got = command(tinyWith("--lr", "1e30", "--steps", "30", "--on-nonfinite", "skip")...)
	require.Equal(t, cli.ExitFault, got.status, got.stderr)
	require.Contains(t, got.stderr, "step 11 is not finite")
	require.Contains(t, got.stderr, "none of the last 10 steps was finite")
}
