package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// root is where the command runs.
func root(t *testing.T) {
	t.Helper()
	t.Chdir("../..")
}

// The losses that are kept hold every bar, the controls none, and page and chart are
// what the command makes of them. Every row is there, with a seed at least.
func TestKeptLedgerHolds(t *testing.T) {
	kept := readTest(t)
	for _, c := range kept.Runs {
		if c.Ended == "" {
			require.Len(t, c.Train, steps, "%s, seed %d", c.Row, c.Seed)
			require.Len(t, c.Held, steps/evalEvery)
		}
	}
	verdicts, err := judge(kept)
	require.NoError(t, err)
	require.Len(t, verdicts, len(bars))
	dir := t.TempDir()
	b, err := os.ReadFile("ledger.json")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "ledger.json"), b, 0o644))
	var table strings.Builder
	held, err := run(options{out: dir}, &table)
	require.NoError(t, err)
	require.True(t, held, table.String())
	page, err := os.ReadFile("README.md")
	require.NoError(t, err)
	for line := range strings.Lines(table.String()) {
		require.Contains(t, string(page), strings.TrimRight(line, " \n"))
	}
	want, err := os.ReadFile("ledger.svg")
	require.NoError(t, err)
	got, err := os.ReadFile(filepath.Join(dir, "ledger.svg"))
	require.NoError(t, err)
	require.Equal(t, string(want), string(got))
}

func readTest(t *testing.T) ledger {
	t.Helper()
	l, err := readLedger("ledger.json")
	require.NoError(t, err)
	require.Equal(t, steps, l.Steps)
	return l
}

// A row that is worse by more than its bar, in either loss, does not hold; one that is
// better does, and a run that ended early never does.
func TestJudgeIsOneSided(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*curve)
		holds  bool
	}{
		"as it is":          {func(*curve) {}, true},
		"much better":       {func(c *curve) { scaled(c, 0.9, 0.9) }, true},
		"held out worse":    {func(c *curve) { scaled(c, 1.03, 1) }, false},
		"in training worse": {func(c *curve) { scaled(c, 1, 1.03) }, false},
		"ended early":       {func(c *curve) { c.Ended = "step 7 is not finite" }, false},
	} {
		l := readTest(t)
		for i := range l.Runs {
			if l.Runs[i].Row == "all" { // the baseline's own losses, changed
				base, _ := l.find("bf16", l.Runs[i].Seed)
				l.Runs[i].Held, l.Runs[i].Train = append([]float64{}, base.Held...), append([]float64{}, base.Train...)
				c.change(&l.Runs[i])
			}
		}
		verdicts, err := judge(l)
		require.NoError(t, err)
		for _, v := range verdicts {
			if v.row == "all" {
				require.Equal(t, c.holds, v.holds, name)
				require.Equal(t, c.holds, v.asMust, name)
			}
		}
		held, err := printed(io.Discard, l, verdicts)
		require.NoError(t, err)
		require.Equal(t, c.holds, held, name)
	}
}

func scaled(c *curve, held, train float64) {
	for i := range c.Held {
		c.Held[i] *= held
	}
	for i := range c.Train {
		c.Train[i] *= train
	}
}

// Each control's edit still fits the source that it is built from.
func TestControlsFitTheSource(t *testing.T) {
	root(t)
	n := 0
	for _, r := range rows() {
		if r.control == nil {
			continue
		}
		n++
		b, err := r.control.edited()
		require.NoError(t, err, r.name)
		for _, e := range r.control.edits {
			require.Contains(t, string(b), e[1])
		}
	}
	require.Equal(t, 4, n)
}
