package processes

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/bench"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
)

// benched returns the arguments of the tiny run for bench zero, which has no --zero.
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

// benchRows runs a bench command, which starts this program again.
func benchRows(t *testing.T, args ...string) (rows []bench.Row, got result) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "rows.json")
	p := start(t, append(args, "--json", path)...)
	got = result{p.end(t), p.out.String(), p.errs.String()}
	require.Zero(t, got.status, got.stderr)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &rows))
	return rows, got
}

// Each stage runs in separate processes, touches the planned memory, sends the paper's number of
// bytes and ends with the same bits. The table fits a terminal, and the chart has the same values.
func TestBenchZeroMeasuresEveryStage(t *testing.T) {
	t.Parallel()
	chart := filepath.Join(t.TempDir(), "new", "chart.svg")
	file := filepath.Join(t.TempDir(), "page.html")
	rows, got := benchRows(t, benched("--svg", chart, "--html", file)...)
	requirePage(t, file, 300_000)
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

// --vary runs stage 3 with one other setting at a time. Settings without effect, or rejected ones,
// are rows with the reason. Rows with the same rows of a step have equal losses where that is
// guaranteed.
func TestBenchZeroVaries(t *testing.T) {
	t.Parallel()
	old := filepath.Join(t.TempDir(), "old.json")
	rows, got := benchRows(t, benched("--rounds", "1", "--reproducible", "--vary", "offload,recompute=full,precision,ranks,accum-order,offload=optimizer=disk,recompute=full,recompute=blue")...)
	byName := map[string]bench.Row{}
	for _, r := range rows {
		byName[r.Name] = r
	}
	require.Len(t, rows, 4+9)
	require.Contains(t, byName["recompute=blue"].Missing, "--recompute blue: ")
	require.Contains(t, got.stderr, "recompute=blue will be missing: --recompute blue: policy ")
	for _, same := range []string{"offload=optimizer=host", "recompute=full", "ranks=1"} {
		require.Empty(t, byName[same].Missing)
		require.Equal(t, rows[3].Losses, byName[same].Losses, same)
		require.Equal(t, rows[3].SHA256, byName[same].SHA256, same)
	}
	require.Less(t, byName["recompute=full"].ClassPeak["activations"], rows[3].ClassPeak["activations"])
	require.Equal(t, []int{1, 2}, []int{byName["ranks=1"].Ranks, byName["ranks=1"].Accum}, "the rows of a step stay")
	require.NotEqual(t, rows[3].Losses, byName["precision=bf16"].Losses)
	require.Equal(t, "it is what ZeRO-3 has", byName["precision=fp32"].Missing)
	require.Contains(t, byName["accum-order=layer"].Missing, "give --accum")
	require.Contains(t, byName["offload=optimizer=disk"].Missing, "--disk")
	require.Contains(t, got.stdout, "precision=bf16 has bits of its own.")
	bad := command(benched("--vary", "colour")...)
	require.Equal(t, cli.ExitBadInput, bad.status)
	require.Contains(t, bad.stderr, `--vary "colour": want a list of offload, recompute, precision, ranks, accum-order`)

	// With one round, another loss and more bytes are reported; times are not, at any difference.
	for i := range rows {
		for _, v := range []*float64{&rows[i].StepSecondsMedian, &rows[i].P10, &rows[i].P90} {
			*v *= 1e6
		}
		if len(rows[i].Losses) > 0 {
			rows[i].Losses[1]++
		}
		rows[i].CommBytesPerStep += 1 << 20
	}
	text, err := json.Marshal(rows)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(old, text, 0o600))
	_, got = benchRows(t, benched("--rounds", "1", "--reproducible", "--compare", old)...)
	require.Contains(t, got.stdout, "Compared with old.json: 8 changes of what has no noise, 0 rows without one.")
	require.Contains(t, got.stdout, "give --rounds 3 or more")
	require.Contains(t, got.stdout, "ZeRO-3, loss, step 2: ")
	require.Contains(t, got.stdout, "precision=bf16 was not run again.")
	got = command(benched("--compare", writeFile(t, "none.json", "[{}]"))...)
	require.Equal(t, cli.ExitBadInput, got.status)
	require.Contains(t, got.stderr, "want rows of version 1")
}

// A stage that does not fit is a row with the reason; other flags are checked before the runs.
func TestBenchZeroSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	rows, got := benchRows(t, benched("--device-memory", "700KiB", "--rounds", "1")...)
	require.Contains(t, rows[0].Missing, "device memory")
	require.Empty(t, rows[3].Missing)
	require.Contains(t, got.stdout, "ZeRO-0 is missing: does not fit")
	for args, want := range map[string]string{
		"--svg chart.png":            "give a name that ends in .svg",
		"--rounds 0":                 "--rounds 0: at least 1 is needed",
		"--warmup-steps 3":           "--warmup-steps 3 of --steps 3: at least one step has to count",
		"--trace t.json":             "--trace: bench zero runs every stage",
		"--json /":                   "--json: open /: is a directory",
		"--html /dev/null/page.html": "--html: mkdir /dev/null: not a directory",
	} {
		got := command(benched(strings.Fields(args)...)...)
		require.Equal(t, cli.ExitBadInput, got.status, args)
		require.Contains(t, got.stderr, want)
	}
	p := start(t, benched("--data", "no-such-file")...)
	require.Equal(t, cli.ExitBadInput, p.end(t))
	require.Contains(t, p.errs.String(), "spillway: --data: open data: no-such-file does not exist")
}

// PyTorch, if python3 has it, trains the same model on the same tokens, and its losses agree. An
// unsupported configuration is a row with the reason. The results before an interrupt are shown. A
// benchmark without data ends before it measures the machine.
func TestBenchKeepsWhatWasMeasured(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "rows.json")
	p := start(t, benched("--rounds", "100000", "--json", file)...)
	later := regexp.MustCompile(`round ([2-9]|\d\d+) of`) // lines of progress are some time apart
	waitFor(t, "a second round", func() bool { return later.MatchString(p.errs.String()) })
	require.NoError(t, p.Process.Signal(os.Interrupt))
	require.Equal(t, cli.ExitInterrupted, p.end(t))
	require.Regexp(t, `The command was interrupted in round [0-9]+, in ZeRO-[0-3]: what ran until then is counted\.`, strings.Join(strings.Fields(p.out.String()), " "))
	require.Contains(t, p.out.String(), "Time of a step")
	require.FileExists(t, file)

	got := command("bench", "scale", "--model", testdata+"/gpt2")
	require.Equal(t, cli.ExitBadInput, got.status)
	require.Contains(t, got.stderr, "spillway: --data is missing: give a token file")
	require.NotContains(t, got.stderr, "measuring")
}

func TestBenchZeroBesidePyTorch(t *testing.T) {
	t.Parallel()
	rows, got := benchRows(t, benched("--rounds", "1", "--accum", "2", "--peer", "torch")...)
	require.Len(t, rows, 8)
	for _, r := range rows[4:6] {
		if strings.Contains(r.Missing, "no PyTorch") || strings.Contains(r.Missing, "no python3") {
			t.Skip(r.Missing)
		}
		require.Empty(t, r.Missing)
		require.Len(t, r.Losses, 3)
		require.InEpsilonSlice(t, rows[r.Zero].Losses, r.Losses, 1e-4)
		require.Positive(t, r.ResidentBytes)
		require.Contains(t, got.stdout, "against "+r.Name)
	}
	require.NotEmpty(t, rows[7].Missing, "its offload needs a GPU")
	got = command(benched("--peer", "jax")...)
	require.Equal(t, cli.ExitBadInput, got.status)
	require.Contains(t, got.stderr, `--peer "jax": want torch`)
}

// Every number of ranks runs in separate processes, with and without overlap. Losses are equal for
// equal rows of a step. Predictions are written before the runs; more ranks than processors have
// none.
func TestBenchScale(t *testing.T) {
	scale := func(args ...string) []string {
		return append([]string{"bench", "scale", "--model", testdata + "/gpt2", "--data", testdata + "/text.bin", "--batch", "1", "--seq", "16", "--steps", "3", "--warmup-steps", "1", "--rounds", "1", "--calibrate=false"}, args...)
	}
	over := 2 * runtime.GOMAXPROCS(0)
	page := filepath.Join(t.TempDir(), "page.html")
	rows, got := benchRows(t, scale("--ranks", fmt.Sprint(over), "--mode", "strong", "--reproducible", "--html", page, "--gpu", "none")...)
	requirePage(t, page, 300_000)
	require.Equal(t, []any{1, "strong", true}, []any{rows[0].Ranks, rows[0].Mode, rows[0].Overlap})
	require.InDelta(t, 1, *rows[0].Efficiency, 1e-9)
	for _, r := range rows {
		require.Equal(t, over, r.Ranks*r.Accum*r.Batch, "the rows of a step stay")
		require.Equal(t, rows[0].Losses, r.Losses)
		require.Equal(t, rows[0].SHA256, r.SHA256)
		require.Equal(t, *r.Seconds, r.StepSecondsMedian)
		require.InDelta(t, *rows[0].Seconds / *r.Seconds / float64(r.Ranks), *r.Efficiency, 1e-9)
		require.Equal(t, r.Ranks > runtime.GOMAXPROCS(0), r.Oversubscribed)
		require.Equal(t, r.Oversubscribed, r.Predicted == nil)
	}
	for _, r := range rows {
		names := map[string]bool{}
		for _, word := range r.Command {
			name, _, _ := strings.Cut(word, "=")
			require.False(t, names[name], "%s comes twice: %s", name, r.Command)
			names[name] = true
		}
	}
	require.Equal(t, over, rows[len(rows)-1].Ranks)
	require.False(t, rows[len(rows)-1].Overlap)
	require.Contains(t, got.stderr, "Predicted before the runs: strong 1 ")
	require.Contains(t, got.stdout, "Predicted against measured step, of ")

	rows, _ = benchRows(t, scale("--ranks", "1", "--mode", "weak", "--gpu", "rtx-4090")...)
	require.Len(t, rows, 11)
	last := rows[9]
	require.True(t, last.Simulated && last.Overlap)
	require.Equal(t, 16384, last.Ranks)
	require.Nil(t, last.Seconds)
	require.Positive(t, *last.Predicted)
	require.Less(t, *last.Efficiency, 1.0)
	require.Greater(t, *rows[10].Predicted, *last.Predicted, "without overlap it takes longer")
	rows, _ = benchRows(t, "bench", "scale", "--ranks", "1", "--mode", "weak", "--rounds", "1", "--steps", "2", "--warmup-steps", "1",
		"--calibrate=false", "--batch", "1", "--seq", "16")
	require.Equal(t, []string{"spillway-demo", "llama-3-8b"}, []string{rows[0].Model, rows[1].Model}, "the demo is no model for 16,384 GPUs")
	for args, want := range map[string]string{"--mode odd": `--mode "odd": want strong, weak, or both`, "--gpu gpu9": "--gpu: ", "--ranks 100": "--ranks 100: 1 to 64",
		"--overlap off": "--overlap: bench scale runs several numbers of ranks with and without", "--device cuda": "--device cuda: bench scale runs CPU ranks"} {
		got := command(scale(strings.Fields(args)...)...)
		require.Equal(t, cli.ExitBadInput, got.status, args)
		require.Contains(t, got.stderr, want)
	}
}
