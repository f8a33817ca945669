package bench

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
)

// 1,000 elements over 4 ranks: a part of 750 travels, in the bytes of what it is.
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

// Rows of other jobs say nothing about what changed.
func TestCompareOfOtherJobs(t *testing.T) {
	old, now := &Row{Name: "ZeRO-0", Model: "gpt2", Ranks: 2}, &Row{Name: "ZeRO-0", Model: "gpt2", Ranks: 4}
	require.Equal(t, "Compared with a.json: no row is of the same job.", compare("a.json", []*Row{old}, []*Row{now}).lines()[0])
	require.Equal(t, "Compared with a.json: nothing changed beyond noise.", compare("a.json", []*Row{old}, []*Row{old}).lines()[0])
}

// On a machine that runs at half its speed in one round of two, steps at its whole speed are
// those of the other round.
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

// Whatever names and numbers are in a table, it fits a terminal, and no column is lost.
func TestTablesFitATerminal(t *testing.T) {
	v := 12345.6789
	long := &Row{Name: "16384 × rtx-pro-6000, no overlap", PlannedBytes: 1 << 40, ResidentBytes: 1 << 40, TokensPerS: 133303546,
		StepSecondsMedian: v, P10: v, P90: v, Predicted: &v, FlopsShare: &v, HiddenShare: &v, LossLast: v,
		ByClass: map[string]int64{"activations": 1 << 40}, Scaling: &Scaling{Seconds: &v, Efficiency: &v, AtSpeed: &v, Oversubscribed: true}}
	for _, list := range [][]table{zeroTables, scaleTables} {
		for _, tab := range list {
			var out strings.Builder
			tab.print(&out, []*Row{long, {Name: "short", Missing: "did not fit", Scaling: &Scaling{}}})
			for line := range strings.Lines(out.String()) {
				require.LessOrEqual(t, utf8.RuneCountInString(strings.TrimSuffix(line, "\n")), terminal, line)
			}
			for _, c := range tab.columns {
				require.Contains(t, out.String(), c.head)
			}
		}
	}
}
