package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/bench"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
)

// benched is the tiny run as bench zero takes it: without a stage.
func benched(args ...string) []string {
	return append([]string{"bench", "zero", "--model", testdata + "/gpt2", "--data", testdata + "/text.bin", "--batch", "1", "--seq", "16", "--steps", "3", "--warmup-steps", "1", "--rounds", "2", "--ranks", "2", "--calibrate=false"}, args...)
}

func TestBenchZeroRefusesWhatItWouldIgnore(t *testing.T) {
	for _, flag := range []string{"--zero=3", "--fit", "--metrics=m.jsonl", "--checkpoint=c", "--resume", "--save-every=1", "--keep=2"} {
		got := command(benched(flag)...)
		name, _, _ := strings.Cut(flag, "=")
		require.Equal(t, cli.ExitBadInput, got.status, flag)
		require.Contains(t, got.stderr, "spillway: "+name+": bench zero runs every stage")
		require.Contains(t, got.stderr, "leave it out")
		require.NotContains(t, got.stderr, "give --fit")
	}
	got := command(benched("--config", writeFile(t, "c.yaml", "keep: 2\n"))...)
	require.Equal(t, cli.ExitBadInput, got.status)
	require.Contains(t, got.stderr, "--keep: bench zero runs every stage")
}

// benchRows runs a bench command in this process, its rows in processes of their own.
func benchRows(t *testing.T, args ...string) (rows []bench.Row, got result) {
	t.Helper()
	if testing.Short() {
		t.Skip("starts processes")
	}
	t.Setenv(asCommandEnv, "1")
	path := filepath.Join(t.TempDir(), "rows.json")
	got = command(append(args, "--json", path)...)
	require.Zero(t, got.status, got.stderr)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &rows))
	return rows, got
}

// Each stage runs in processes of its own, touches what was planned, sends what the paper
// says and ends with the same bits; the table fits a terminal, and the chart says the same.
func TestBenchZeroMeasuresEveryStage(t *testing.T) {
	chart := filepath.Join(t.TempDir(), "new", "chart.svg")
	rows, got := benchRows(t, benched("--svg", chart)...)
	require.Len(t, rows, 4)
	picture, err := os.ReadFile(chart)
	require.NoError(t, err)
	for i, r := range rows {
		require.Equal(t, i, r.Zero)
		require.Equal(t, []int{2, 1, 16, 1}, []int{r.Ranks, r.Batch, r.Seq, r.Accum})
		require.Positive(t, r.PlannedBytes)
		require.Equal(t, r.PlannedBytes, r.DevicePeakBytes)
		require.Equal(t, [][]int{{2}, {2}}, [][]int{{len(r.Rounds[0])}, {len(r.Rounds[1])}}, "without the warm-up")
		require.True(t, 0 < r.P10 && r.P10 <= r.StepSecondsMedian && r.StepSecondsMedian <= r.P90)
		require.InDelta(t, 32/r.StepSecondsMedian, r.TokensPerS, 1e-6)
		sent := int64(0)
		for _, n := range r.Sent {
			sent += n
		}
		require.Equal(t, sent, r.CommBytesPerStep, "planned by collective is what was sent")
		require.InEpsilon(t, r.TextbookBytes, r.CommBytesPerStep, 0.15)
		require.Len(t, r.Losses, 3)
		require.Equal(t, rows[0].Losses, r.Losses)
		require.Equal(t, rows[0].SHA256, r.SHA256)
		require.True(t, *r.FlopsShare > 0 && *r.FlopsShare < 1)
		require.True(t, *r.HiddenShare >= 0 && *r.HiddenShare <= 1)
		require.Positive(t, r.ResidentBytes)
		require.Contains(t, string(picture), ">"+r.Name+"<")
	}
	require.Contains(t, got.stdout, "The same bits, every loss and the parameters' SHA-256: ZeRO-0, ZeRO-1, ZeRO-2,\n  ZeRO-3.")
	require.Contains(t, got.stdout, "micro-batch 1 × 16 tokens")
	for line := range strings.Lines(got.stdout) {
		require.LessOrEqual(t, utf8.RuneCountInString(line), 81, line)
	}
}

// A stage that does not fit is a row that says so; other flags are checked before the runs.
func TestBenchZeroSaysWhatIsMissing(t *testing.T) {
	rows, got := benchRows(t, benched("--device-memory", "700KiB", "--rounds", "1")...)
	require.Contains(t, rows[0].Missing, "device memory")
	require.Empty(t, rows[3].Missing)
	require.Contains(t, got.stdout, "ZeRO-0 is missing: does not fit")
	for args, want := range map[string]string{
		"--svg chart.png":     "give a name that ends in .svg",
		"--rounds 0":          "--rounds 0: at least 1 is needed",
		"--warmup-steps 3":    "--warmup-steps 3 of --steps 3: at least one step has to count",
		"--trace t.json":      "--trace: bench zero runs every stage",
		"--data no-such-file": "ZeRO-0: --data",
	} {
		got := command(benched(strings.Fields(args)...)...)
		require.Equal(t, cli.ExitBadInput, got.status, args)
		require.Contains(t, got.stderr, want)
	}
}
