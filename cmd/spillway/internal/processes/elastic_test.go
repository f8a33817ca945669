//go:build linux

package processes

import (
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/internal/testkit/long"
)

// A job that repeatedly loses ranks continues with the remaining ones, adds replacements at a
// checkpoint, and ends with the bits of a run on one rank.
func TestElasticJobOutlivesItsRanks(t *testing.T) {
	t.Parallel()
	// Long enough for launch, which looks for checkpoints every 50 ms, to add new ranks at one.
	reproducible := tinyWith("--reproducible", "--global-batch", "8", "--steps", "96", "--seq", "8", "--clip", "1")
	p := start(t, reproducible...)
	require.Zero(t, p.end(t), p.errs.String())
	want := shaOf(t, p.out.String())
	r := rand.New(rand.NewPCG(16, 22))
	for i, flags := range [][]string{{"--restarts", "0", "--min-ranks", "3"}, {"--restarts", "20", "--min-ranks", "1"}, {"--restarts", "1", "--min-ranks", "2", "--max-ranks", "3"}}[:long.Or(2, 3)] {
		ck := filepath.Join(t.TempDir(), "ck")
		newest := func() string { // a new step is in a checkpoint after at most 4 steps
			steps, _ := filepath.Glob(filepath.Join(ck, "step-*")) // its pattern is well formed
			return slices.Max(append(steps, ""))
		}
		p := start(t, append(append([]string{"launch", "-n", "4"}, append(flags, "--")...), append(reproducible, "--checkpoint", ck, "--save-every", "4")...)...)
		for kills, before := 0, ""; kills < min(i+1, 2); kills, before = kills+1, newest() {
			drawn := r.IntN(4)
			killAfter(t, p, "checkpoint", func() int {
				if pids := childrenOf(p.Process.Pid); len(pids) > 0 {
					return pids[drawn%len(pids)]
				}
				return 0
			}, func() bool { return newest() > before })
		}
		require.Zero(t, p.end(t), p.errs.String())
		require.Equal(t, want, shaOf(t, p.out.String()), p.errs.String())
		if i == 0 { // 3 ranks do not divide the step evenly
			require.Regexp(t, `launch: lost rank [0-3] \(process [0-9]+\): signal: killed; going on with 3 ranks from the checkpoint of step`, p.errs.String())
			continue
		}
		// Both kills may hit the same group of ranks.
		require.Regexp(t, `launch: lost rank [0-3] \(process [0-9]+\): signal: killed; going on with [1-4] ranks? from the checkpoint of step [0-9]+: [0-9]+ steps? (is|are) run again; [1-3] more from the next checkpoint on`, p.errs.String())
		if flags[1] == "20" {
			require.Contains(t, p.errs.String(), "launch: going on with 4 ranks from the checkpoint of step ")
		} else {
			require.NotContains(t, p.errs.String(), "going on with 4 rank")
		}
	}
}

// A launched finetune, whose steps follow from its epochs, continues after losing a rank, with the
// bits of one process. It turns --fit off, which takes longer than the runs; TestLaunchFinetunes
// has it on.
func TestLaunchedFinetuneOutlivesARank(t *testing.T) {
	t.Parallel()
	job := []string{"finetune", testdata + "/gpt2", testdata + "/text.txt", "--seq", "16", "--lora", "r=2", "--epochs", "2",
		"--fit=false", "--reproducible", "--batch", "1", "--global-batch", "4", "--save-every", "4", "--checkpoint"}
	p := start(t, append(job, filepath.Join(t.TempDir(), "one"))...)
	require.Zero(t, p.end(t), p.errs.String())
	want := shaOf(t, p.out.String())
	for _, flags := range [][]string{{"--restarts", "1"}, {"--min-ranks", "1"}} {
		ck := filepath.Join(t.TempDir(), "ck")
		p := start(t, slices.Concat([]string{"launch", "-n", "2"}, flags, []string{"--"}, job, []string{ck})...)
		pids := ranksOf(t, p, 2)
		killAfter(t, p, "checkpoint", func() int { return pids[1] }, hasCheckpoint(ck))
		require.Zero(t, p.end(t), p.errs.String())
		require.Contains(t, p.errs.String(), map[string]string{
			"--restarts": "starting again from the checkpoint of step ", "--min-ranks": "going on with 1 rank from the checkpoint of step ",
		}[flags[0]])
		require.Equal(t, want, shaOf(t, p.out.String()), p.errs.String())
	}
}

// A divergence is not a lost rank: it ends the job, even with restarts left.
func TestElasticJobEndsAtADivergence(t *testing.T) {
	t.Parallel()
	for _, flags := range [][]string{{"--restarts", "3"}, {"--restarts", "3", "--min-ranks", "1"}} {
		ck := filepath.Join(t.TempDir(), "ck")
		p := start(t, append(append([]string{"launch", "-n", "2"}, append(flags, "--")...), tinyWith("--steps", "5", "--lr", "1e30", "--checkpoint", ck)...)...)
		require.Equal(t, cli.ExitFault, p.end(t), p.errs.String())
		require.Contains(t, p.errs.String(), "is not finite")
		require.NotContains(t, p.errs.String(), "going on")
		require.NotContains(t, p.errs.String(), "starting again")
	}
}

// Fewer ranks need more device memory each. If they do not fit with the given flags, state moves
// off the device, and the bits stay.
func TestElasticJobMovesOutwardToFit(t *testing.T) {
	t.Parallel()
	shape := []string{"--model", testdata + "/gpt2", "--batch", "1", "--seq", "8", "--global-batch", "4", "--reproducible"}
	peak := func(ranks string) int64 {
		_, doc := planned(t, append([]string{"--ranks", ranks}, shape...)...)
		return doc.Requested.Device.PeakBytes
	}
	require.Greater(t, peak("1"), peak("2"))
	job := append([]string{"train", "--data", testdata + "/text.bin", "--steps", "30"}, shape...)
	p := start(t, job...)
	require.Zero(t, p.end(t), p.errs.String())
	want := shaOf(t, p.out.String())
	ck := filepath.Join(t.TempDir(), "ck")
	p = start(t, append([]string{"launch", "-n", "2", "--min-ranks", "1", "--"}, append(job, "--checkpoint", ck, "--save-every", "10", "--device-memory", strconv.FormatInt(peak("2"), 10))...)...)
	pids := ranksOf(t, p, 2)
	killAfter(t, p, "checkpoint", func() int { return pids[1] }, hasCheckpoint(ck))
	require.Zero(t, p.end(t), p.errs.String())
	require.Contains(t, p.errs.String(), "going on with --fit")
	require.Equal(t, want, shaOf(t, p.out.String()))
}
