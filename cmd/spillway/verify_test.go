package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
)

// verify follows a run's chain, runs segments again elsewhere, names what it can't run, and
// ends with status 2 where something is not as recorded.
func TestVerify(t *testing.T) {
	dir := t.TempDir()
	run, receipt := filepath.Join(dir, "run"), filepath.Join(dir, "receipts", "r.jsonl")
	got := command(tinyWith("--reproducible", "--global-batch", "4", "--ranks", "2", "--steps", "7", "--save-every", "2", "--keep", "1", "--checkpoint", run, "--receipt", receipt)...)
	require.Zero(t, got.status, got.stderr)
	require.Regexp(t, `receipt: \S+r.jsonl, 5 lines in [0-9.]+ s, the last of SHA-256 [0-9a-f]{64}\n`, got.stdout)

	got = command("verify", run, "--ranks", "3", "--zero", "1", "--offload", "optimizer=host")
	require.Zero(t, got.status, got.stderr)
	for _, line := range []string{"steps 1 to 2, from the run's first values: equal\n", "steps 3 to 4: not run again: the checkpoint of step 2 is not there any more\n",
		"steps 7 to 7, from step-00000006: equal\n", "the states of step-00000007: equal\n", "run again and equal: 3 of 7 steps (42.9 %)\n"} {
		require.Contains(t, got.stdout, line)
	}
	got = command("verify", run, "--segments", "7-7")
	require.Zero(t, got.status, got.stderr)
	require.Contains(t, got.stdout, "run again and equal: 1 of 7 steps (14.3 %)\n")
	got = command("verify", receipt, "--segments", "1") // without its checkpoints
	require.Zero(t, got.status, got.stderr)
	require.Contains(t, got.stdout, "run again and equal: 2 of 7 steps")

	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"verify"}, "verify: name one folder of checkpoints or receipt; 0 were given"},
		{[]string{"verify", filepath.Join(dir, "none")}, "no such file"},
		{[]string{"verify", dir}, "there is no checkpoint"},
		{[]string{"verify", run, "--segments", "3-1"}, "--segments \"3-1\": want all, a number of segments, or steps"},
		{[]string{"verify", run, "--segments", "3-4"}, "no segment was run again"},
		{[]string{"verify", run, "--ranks", "5"}, "--global-batch 4 is 4 micro-batches of --batch 1, and each of 5 ranks needs one"},
		{[]string{"verify", run, "--device", "cuda"}, "unknown flag --device"},
		{[]string{"verify", filepath.Join(testdata, "text.bin")}, "holds no receipt"},
	} {
		got := command(c.args...)
		require.Equal(t, cli.ExitBadInput, got.status, "%s: %s", c.args, got.stdout)
		require.Contains(t, got.stderr, c.want)
	}

	text, err := os.ReadFile(receipt)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(receipt, []byte(strings.Replace(string(text), `"lr":0.001`, `"lr":0.002`, 1)), 0o644))
	got = command("verify", run)
	require.Equal(t, cli.ExitDoesNotFit, got.status)
	require.Regexp(t, `the chain breaks at line 3, behind step 2: it follows a line of SHA-256`, got.stderr)
}

// Without --reproducible the run's number of ranks is needed, and verify says so.
func TestVerifyNeedsTheRunsRanks(t *testing.T) {
	receipt := filepath.Join(t.TempDir(), "r.jsonl")
	got := command(tinyWith("--ranks", "2", "--steps", "3", "--receipt", receipt)...)
	require.Zero(t, got.status, got.stderr)
	got = command("verify", receipt, "--zero", "0")
	require.Zero(t, got.status, got.stderr)
	got = command("verify", receipt, "--ranks", "3")
	require.Equal(t, cli.ExitBadInput, got.status)
	require.Contains(t, got.stderr, "--ranks 3: it decides bits, and the receipt's run had 2; leave it out")
	got = command(tinyWith("--ranks", "2", "--steps", "3", "--receipt-every", "2")...)
	require.Equal(t, cli.ExitBadInput, got.status)
	require.Contains(t, got.stderr, "--receipt-every needs --receipt")
}
