package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
)

// verify checks a run's chain and runs segments again with other settings. It names segments that it
// cannot run, and ends with status 2 if something differs from the record.
func TestVerify(t *testing.T) {
	dir := t.TempDir()
	run, receipt := filepath.Join(dir, "run"), filepath.Join(dir, "receipts", "r.jsonl")
	got := command(tinyWith("--reproducible", "--global-batch", "4", "--ranks", "2", "--steps", "7", "--save-every", "2", "--keep", "1", "--checkpoint", run, "--receipt", receipt)...)
	require.Zero(t, got.status, got.stderr)
	require.Regexp(t, `receipt: \S+r.jsonl, 5 lines in [0-9.]+ s, the last of SHA-256 [0-9a-f]{64}\n`, got.stdout)

	got = command("verify", run, "--ranks", "3", "--zero", "1", "--offload", "optimizer=host")
	require.Zero(t, got.status, got.stderr)
	for _, line := range []string{"steps 1 to 2, from the run's first values: equal\n", "steps 3 to 4: not run again: the checkpoint of step 2 is not there any more\n",
		"step 7, from step-00000006: equal\n", "the states of step-00000007: equal\n", "run again and equal: 3 of 7 steps (42.9 %)\n"} {
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
		{[]string{"verify", run, "--segments", "3-4"}, "none of those that can be was chosen; their steps are 1-2, 7-7"},
		{[]string{"verify", run, "--ranks", "5"}, "--ranks 5: the run has steps of 4 micro-batches, and each rank needs one; give at most that many"},
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

// A receipt with only its first line, as of a run that was killed early, has the run's initial
// values. verify compares them, and reports that there are no steps. If checkpoints show that steps
// followed, the last lines are missing.
func TestVerifyAReceiptWithoutSteps(t *testing.T) {
	dir := t.TempDir()
	run, receipt, first := filepath.Join(dir, "run"), filepath.Join(dir, "r.jsonl"), filepath.Join(dir, "first.jsonl")
	got := command(tinyWith("--save-every", "1", "--checkpoint", run, "--receipt", receipt)...)
	require.Zero(t, got.status, got.stderr)
	text, err := os.ReadFile(receipt)
	require.NoError(t, err)
	lines := strings.SplitAfter(string(text), "\n")
	verify := func(status int, text, want string, args ...string) {
		t.Helper()
		for _, path := range []string{receipt, first} {
			require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
		}
		got := command(append([]string{"verify"}, args...)...)
		require.Equal(t, status, got.status, got.stdout+got.stderr)
		require.Contains(t, got.stdout+got.stderr, want)
	}
	const none = "no steps were run again: the receipt holds no finished interval of steps, only the run's first values\n"
	verify(0, lines[0], none, first)
	verify(0, lines[0], "the states of the run's first values: equal\nchain: 1 line of "+first+", no steps, written by", first, "--segments", "0-0")
	verify(0, lines[0]+lines[1][:100], "the last line was cut off as it was written: it never counted\n", first)
	verify(0, lines[0]+lines[1][:100], none, first)
	verify(1, lines[0], "none of those that can be was chosen; their steps are 0-0", first, "--segments", "1-2")
	verify(2, strings.Replace(lines[0], `"Seed":1`, `"Seed":2`, 1), "the states of the run's first values: differs: ", first)
	verify(2, lines[0], "it ends after step 0, and there is step-00000001: its last lines are missing", run)
}

// Without --reproducible verify needs the run's number of ranks and says so.
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

// A resume continues the run's receipt and says so. Steps in another file, or in none, count among
// the run's steps.
func TestAResumeFollowsItsReceipt(t *testing.T) {
	dir := t.TempDir()
	run, receipt, other := filepath.Join(dir, "run"), filepath.Join(dir, "r.jsonl"), filepath.Join(dir, "other.jsonl")
	train := func(steps string, args ...string) result {
		got := command(tinyWith(append([]string{"--reproducible", "--ranks", "2", "--steps", steps, "--checkpoint", run}, args...)...)...)
		require.Zero(t, got.status, got.stderr)
		return got
	}
	verify := func(status int, want string, args ...string) {
		t.Helper()
		got := command(append([]string{"verify", run}, args...)...)
		require.Equal(t, status, got.status, got.stdout+got.stderr)
		require.Contains(t, got.stdout+got.stderr, want)
	}
	train("2", "--global-batch", "4", "--receipt", receipt)
	got := train("4", "--global-batch", "8", "--resume")
	require.Contains(t, got.stderr, "receipt: going on in "+receipt+", as --checkpoint says")
	require.Contains(t, got.stderr, "--global-batch: 4 → 8")
	require.NotContains(t, got.stderr, "--accum")
	verify(0, "run again and equal: 4 of 4 steps")
	text, err := os.ReadFile(receipt)
	require.NoError(t, err)

	got = train("5", "--global-batch", "8", "--resume", "--receipt", other)
	require.Contains(t, got.stderr, "steps until 4 are in "+receipt+", and those from here on in "+other)
	verify(0, "steps 1 to 4: not run again: they are in the receipt")
	verify(0, "run again and equal: 1 of 5 steps (20.0 %)")
	verify(0, "run again and equal: 4 of 5 steps (80.0 %)", "--receipt", receipt)
	require.NoError(t, os.Rename(other, other+".moved"))
	got = train("6", "--global-batch", "8", "--resume")
	require.Contains(t, got.stderr, "is not there, and steps from here on are in none; give --receipt")
	verify(1, "name: open "+other+": no such file or directory; give --receipt, the file where it lies now")
	verify(0, "step 6: not run again: the run had no receipt then", "--receipt", other+".moved")

	// A copy without its newest checkpoint does not replace the lines of another run.
	require.NoError(t, os.Rename(other+".moved", other))
	require.NoError(t, os.RemoveAll(filepath.Join(run, "step-00000006")))
	train("8", "--global-batch", "8", "--resume", "--save-every", "1")
	require.NoError(t, os.RemoveAll(filepath.Join(run, "step-00000008")))
	require.NoError(t, os.RemoveAll(filepath.Join(run, "step-00000007")))
	got = command(tinyWith("--reproducible", "--ranks", "2", "--steps", "8", "--global-batch", "8", "--checkpoint", run, "--resume")...)
	require.Equal(t, cli.ExitBadInput, got.status)
	require.Contains(t, got.stderr, "goes on behind it to step 8 by way of other checkpoints")

	// Each checkpoint records the line after which it was saved.
	lines := strings.SplitAfter(string(text), "\n")
	require.NoError(t, os.WriteFile(receipt, []byte(strings.Join(lines[:2], "")), 0o644))
	verify(2, "its last lines are missing", "--receipt", receipt)
	require.NoError(t, os.WriteFile(receipt, text, 0o644))
	path := filepath.Join(run, "step-00000004", "tokenizer.json")
	small, err := os.ReadFile(path)
	require.NoError(t, err)
	small[len(small)/2] ^= 1
	require.NoError(t, os.WriteFile(path, small, 0o644))
	verify(2, "tokenizer.json has CRC-32C", "--receipt", receipt)
}

// Each later resume reports steps that are in no receipt; neither receipt contains them.
func TestStepsBetweenReceipts(t *testing.T) {
	dir := t.TempDir()
	run, first, second := filepath.Join(dir, "run"), filepath.Join(dir, "1.jsonl"), filepath.Join(dir, "2.jsonl")
	train := func(steps, want string, args ...string) {
		t.Helper()
		got := command(tinyWith(append([]string{"--steps", steps, "--checkpoint", run, "--keep", "0"}, args...)...)...)
		require.Zero(t, got.status, got.stderr)
		require.Contains(t, got.stderr, want)
	}
	train("2", "", "--receipt", first)
	require.NoError(t, os.Rename(first, first+".moved"))
	train("3", "is not there, and steps from here on are in none", "--resume")
	require.NoError(t, os.Rename(first+".moved", first))
	train("4", "warning: the run had a receipt until step 2, ", "--resume")
	train("5", "steps until 2 are in "+first+", steps 3 to 4 in none, and those from here on in "+second,
		"--resume", "--receipt", second)
	for receipt, want := range map[string]string{
		first:  "step 5: not run again: they are in the receipt \"" + second,
		second: "steps 1 to 2: not run again: they are in the receipt \"" + first,
	} {
		got := command("verify", run, "--receipt", receipt)
		require.Zero(t, got.status, got.stderr)
		require.Contains(t, got.stdout, want)
		require.Contains(t, got.stdout, "steps 3 to 4: not run again: the run had no receipt then")
	}
}

// A run that cannot be verified here does not count as different; the error names the flag.
func TestVerifyElsewhere(t *testing.T) {
	receipt := filepath.Join(t.TempDir(), "r.jsonl")
	got := command(tinyWith("--ranks", "2", "--accum", "2", "--zero", "1", "--receipt", receipt)...)
	require.Zero(t, got.status, got.stderr)
	for _, c := range []struct{ args, want string }{
		{"--data ../../README.md", "can't be verified here: its run had other data"},
		{"--model " + testdata + "/llama-tied", "can't be verified here: its run had other model; give --model"},
		{"--zero 3", "--zero 3: without --reproducible it decides bits, and the receipt's run had stage 0 or 1"},
		{"--segments 9-12", "none of those that can be was chosen; their steps are 1-2"},
		{"--data " + receipt + ".none", "with the run's settings and paths where none are given: --data"},
	} {
		got := command(append([]string{"verify", receipt}, strings.Fields(c.args)...)...)
		require.Equal(t, cli.ExitBadInput, got.status, "%s: %s", c.args, got.stdout)
		require.Contains(t, got.stderr, c.want)
	}
}
