package bench

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
)

// TestTextbookCountsThePrecision checks the bytes that a rank sends for 1,000 elements over 4 ranks.
// Each collective sends 750 elements, twice in an all-reduce, in the bytes of its type.
func TestTextbookCountsThePrecision(t *testing.T) {
	of := func(precision, reduce, order string, reproducible bool, accum int) (sent [4]int64) {
		for stage := range sent {
			c := spillway.Default()
			c.Precision, c.Reduce, c.AccumOrder, c.Reproducible, c.Accum, c.Ranks, c.Zero = precision, reduce, order, reproducible, accum, 4, stage
			for _, n := range textbook(c, 1000) {
				sent[stage] += n
			}
		}
		return sent
	}
	require.Equal(t, [4]int64{6000, 6000, 6000, 9000}, of("fp32", "same", "micro", false, 1))
	require.Equal(t, [4]int64{3000, 3000, 3000, 4500}, of("bf16", "same", "micro", false, 1))
	require.Equal(t, [4]int64{6000, 4500, 4500, 6000}, of("fp16", "fp32", "micro", false, 1))
	require.Equal(t, [4]int64{6000, 6000, 9000, 18000}, of("fp32", "same", "micro", false, 2))
	require.Equal(t, [4]int64{6000, 6000, 6000, 9000}, of("fp32", "same", "layer", false, 2), "layer order moves each once")
	require.Equal(t, [4]int64{6000, 4500, 4500, 9000}, of("bf16", "same", "micro", true, 2), "stage 0 gathers the leaves' sum in fp32")
}

func TestTuningNamesWhatChangesThePeer(t *testing.T) {
	require.Equal(t, []string{"MALLOC_ARENA_MAX=1", "OMP_NUM_THREADS=2", "OPENBLAS_CORETYPE=Haswell"},
		tuning([]string{"HOME=/root", "OPENBLAS_CORETYPE=Haswell", "COMP=1", "OMP_NUM_THREADS=2", "MALLOC_ARENA_MAX=1"}))
}

// Rows of other jobs are not compared.
func TestCompareOfOtherJobs(t *testing.T) {
	old, now := &Row{Name: "ZeRO-0", Model: "gpt2", Ranks: 2}, &Row{Name: "ZeRO-0", Model: "gpt2", Ranks: 4}
	require.Equal(t, "Compared with a.json: no row is of the same job.", compare("a.json", []*Row{old}, []*Row{now}).lines()[0])
	old.Rounds = [][]float64{{1}, {1}, {1}}
	require.Equal(t, "Compared with a.json: nothing changed beyond noise.", compare("a.json", []*Row{old}, []*Row{old}).lines()[0])
}

// With fewer than three rounds on either side, times are not reported as changed.
func TestCompareOfFewRounds(t *testing.T) {
	of := func(seconds float64, rounds int) *Row {
		return &Row{Name: "ZeRO-0", StepSecondsMedian: seconds, P10: seconds, P90: seconds,
			Rounds: slices.Repeat([][]float64{{seconds}}, rounds)}
	}
	for _, c := range []struct {
		before, now int
		want        string
	}{
		{3, 3, "1 changes beyond noise, 0 rows without one."},
		{1, 3, "what has no noise is the same."},
		{5, 2, "what has no noise is the same."},
	} {
		lines := compare("a.json", []*Row{of(2, c.before)}, []*Row{of(1, c.now)}).lines()
		require.Equal(t, "Compared with a.json: "+c.want, lines[0])
		require.Equal(t, min(c.before, c.now) >= 3, strings.Contains(lines[1], "  ZeRO-0, step: 1.000 s, was 2.000 s -50.0 %"), lines[1])
		require.Equal(t, min(c.before, c.now) < 3, strings.Contains(strings.Join(lines, "\n"), "--rounds 3"))
	}
	moved := of(1, 1)
	moved.CommBytesPerStep = 1
	lines := compare("a.json", []*Row{of(2, 1)}, []*Row{moved}).lines()
	require.Equal(t, "Compared with a.json: 1 changes of what has no noise, 0 rows without one.", lines[0])
}

// On a machine at half its speed in one of two rounds, steps at the predicted speed equal those of
// the other round.
func TestStepsAtThePredictedSpeed(t *testing.T) {
	predicted := 1.0
	r := Row{Ranks: 1, Predicted: &predicted, Rounds: [][]float64{{1.1, 1.1}, {2.2, 2.2}}, StepSecondsMedian: 1.65,
		Scaling: &Scaling{Mode: weak, Speed: []float64{1, 0.5}}}
	s := &session{jobs: []*job{{Row: r}}}
	s.efficiencies()
	require.InDelta(t, 1.1, *s.jobs[0].AtSpeed, 1e-12)
	require.Equal(t, "Predicted against measured step, of 1 row: off by 65.0 % in the median, by 65.0 % at worst. "+
		"Predicted against step at the predicted speed, of 1 row: off by 10.0 % in the median, by 10.0 % at worst.", s.accuracy())
}

// A table with any names and numbers fits a terminal, and no column is lost.
func TestTablesFitATerminal(t *testing.T) {
	v := 12345.6789
	long := &Row{Name: "16384 × rtx-pro-6000, no overlap", PlannedBytes: 1 << 40, ResidentBytes: 1 << 40, TokensPerS: 133303546,
		StepSecondsMedian: v, P10: v, P90: v, Predicted: &v, FlopsShare: &v, HiddenShare: &v, LossLast: v,
		ByClass: map[string]int64{"activations": 1 << 40}, Scaling: &Scaling{Seconds: &v, Efficiency: &v, AtSpeed: &v, Oversubscribed: true}}
	longer := *long
	longer.Name = "offload=activations=host:" + strings.Repeat("h.{0-3}.mlp.act|", 5)
	for _, list := range [][]table{zeroTables, scaleTables} {
		for _, tab := range list {
			var out strings.Builder
			tab.print(&out, []*Row{long, &longer, {Name: "short", Missing: "did not fit", Scaling: &Scaling{}}})
			for line := range strings.Lines(out.String()) {
				require.LessOrEqual(t, utf8.RuneCountInString(strings.TrimSuffix(line, "\n")), terminal, line)
			}
			for _, c := range tab.columns {
				require.Contains(t, out.String(), c.head)
			}
			lines := strings.Split(out.String(), "\n")
			at := slices.Index(lines, longer.Name[:terminal])
			require.Equal(t, longer.Name[terminal:], lines[at+1])
			blank := strings.Repeat(" ", utf8.RuneCountInString(long.Name))
			require.Equal(t, strings.Replace(lines[at-1], long.Name, blank, 1), lines[at+2], "numbers stand below each other")
		}
	}
}

// Rows of the other command are rejected.
func TestCompareRefusesRowsOfTheOtherCommand(t *testing.T) {
	path := filepath.Join(t.TempDir(), "scale.json")
	row := Row{Version: rowVersion, Name: "weak 1", Scaling: &Scaling{Mode: weak}}
	require.NoError(t, cli.WriteJSON(nil, path, []*Row{&row}))
	_, err := readRows(path, false)
	require.ErrorContains(t, err, `scale.json": it has rows of bench scale; give a file that bench zero --json wrote`)
	_, err = readRows(path, true)
	require.NoError(t, err)
	row.Scaling = nil
	require.NoError(t, cli.WriteJSON(nil, path, []*Row{&row}))
	_, err = readRows(path, true)
	require.ErrorContains(t, err, "it has rows of bench zero; give a file that bench scale --json wrote")
}

func TestSharesAboveThePeakAreExplained(t *testing.T) {
	half, over := 0.5, 1.04
	s := &session{jobs: []*job{{Row: Row{Name: "ZeRO-0", Precision: "fp32", FlopsShare: &half}}, {Row: Row{Name: "precision=bf16", Precision: "bf16", FlopsShare: &half}}}}
	require.Empty(t, s.overPeak())
	s.jobs[1].FlopsShare = &over
	require.Equal(t, "Over 100 % of peak: precision=bf16. The peak is of fp32 products, and 16-bit ones can be faster.", s.overPeak())
	s.jobs[0].FlopsShare = &over
	require.Equal(t, "Over 100 % of peak: ZeRO-0, precision=bf16. The peak was measured too low, as when other programs run. "+
		"Run again when nothing else runs.", s.overPeak())
}

// After an interrupt in the first round, rows that have not run are missing, with null for the
// measurements.
func TestInterruptInTheFirstRound(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	one := func() *job { return &job{Row: Row{Ranks: 1, PlannedBytes: 7}, argv: []string{os.Args[0]}} } // the program is not started
	s := &session{progress: io.Discard, rounds: 1, jobs: []*job{one(), one()}}
	require.ErrorIs(t, s.measure(ctx), context.Canceled, "nothing was measured")
	s.jobs[0].Rounds = [][]float64{{2}}
	require.NoError(t, s.measure(ctx))
	require.ErrorIs(t, s.stopped, context.Canceled)
	text, err := json.Marshal(s.rows())
	require.NoError(t, err)
	var rows []map[string]any
	require.NoError(t, json.Unmarshal(text, &rows))
	require.Equal(t, 2.0, rows[0]["step_seconds_median"])
	require.Equal(t, "its first run had not ended", rows[1]["missing"])
	for _, key := range []string{"device_peak_bytes", "step_seconds_median", "tokens_per_s", "comm_bytes_per_step", "loss_last", "resident_peak_bytes", "data_wait_seconds"} {
		require.NotNil(t, rows[0][key], key)
		value, is := rows[1][key]
		require.True(t, is && value == nil, key)
	}
	require.Equal(t, 7.0, rows[1]["device_planned_bytes"], "the plan is known")
}
