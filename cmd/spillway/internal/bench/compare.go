package bench

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"

	"github.com/dustin/go-humanize/english"

	page "github.com/spillway-ml/spillway/memplan/report"
	"github.com/spillway-ml/spillway/plan"
)

// readRows reads a --json file of bench scale, or of bench zero.
func readRows(path string, ofScale bool) (rows []*Row, err error) {
	text, err := os.ReadFile(path)
	if err == nil && json.Unmarshal(text, &rows) != nil {
		rows = nil
	}
	if err == nil && (len(rows) == 0 || slices.ContainsFunc(rows, func(r *Row) bool { return r == nil || r.Version != rowVersion })) {
		err = fmt.Errorf("want rows of version %d, as --json of this version writes them", rowVersion)
	}
	names := map[bool]string{false: "bench zero", true: "bench scale"}
	if err == nil && (rows[0].Scaling != nil) != ofScale {
		err = fmt.Errorf("it has rows of %s; give a file that %s --json wrote", names[!ofScale], names[ofScale])
	}
	if err != nil {
		return nil, fmt.Errorf("--compare %.80q: %w", path, err)
	}
	return rows, nil
}

// difference is one changed value of a row.
type difference struct{ row, what, old, now, change string }

// compared holds the changes beyond noise between two runs, and notes on rows that cannot be
// compared.
type compared struct {
	with    string
	changes []difference
	notes   []string
	same    int  // rows without a change
	unknown bool // the noise of some row is unknown: too few rounds
}

// noisyRounds is the minimum number of rounds from which the noise of times is known.
const noisyRounds = 3

// noise returns the smallest and the largest median of a row's rounds.
func (r *Row) noise() (least, most float64) {
	var medians []float64
	for _, round := range r.Rounds {
		medians = append(medians, quantile(round, 0.5))
	}
	return slices.Min(medians), slices.Max(medians)
}

// compare finds changes. A time has changed if the intervals of the rounds' medians do not overlap,
// resident memory if it differs by more than 2 % and 8 MiB, and any other value if it differs at
// all. With fewer than noisyRounds rounds it compares only values without noise.
func compare(path string, old, now []*Row) *compared {
	c := &compared{with: filepath.Base(path)}
	if a, b := old[0], now[0]; a.Machine.CPU != b.Machine.CPU || a.Machine.Cores != b.Machine.Cores || a.Machine.SIMD != b.Machine.SIMD {
		c.notes = append(c.notes, fmt.Sprintf("The old rows are of another machine (%s, %d threads, %s), so times compare machines.", a.Machine.CPU, a.Machine.Cores, a.Machine.SIMD))
	}
	for _, n := range now {
		i := slices.IndexFunc(old, func(o *Row) bool { return o.Name == n.Name })
		if i < 0 {
			c.notes = append(c.notes, n.Name+" is new.")
			continue
		}
		c.row(old[i], n)
	}
	for _, o := range old {
		if !slices.ContainsFunc(now, func(n *Row) bool { return n.Name == o.Name }) {
			c.notes = append(c.notes, o.Name+" was not run again.")
		}
	}
	return c
}

// residentNoise is the possible difference in resident memory between equal runs, caused by the
// heap.
const residentNoise = 8 << 20

func (c *compared) row(o, n *Row) {
	if o.Missing != "" || n.Missing != "" {
		if o.Missing != n.Missing {
			c.notes = append(c.notes, fmt.Sprintf("%s: missing before: %q, now: %q.", n.Name, o.Missing, n.Missing))
		}
		return
	}
	type job struct {
		model, precision         string
		ranks, batch, seq, accum int
	}
	if was, is := (job{o.Model, o.Precision, o.Ranks, o.Batch, o.Seq, o.Accum}), (job{n.Model, n.Precision, n.Ranks, n.Batch, n.Seq, n.Accum}); was != is {
		c.notes = append(c.notes, fmt.Sprintf("%s is another job: %s with %s of %d × %d tokens before.",
			n.Name, o.Model, english.Plural(o.Ranks, "rank", ""), o.Batch, o.Seq))
		return
	}
	before := len(c.changes)
	add := func(what, was, is string, ratio float64) {
		text := ""
		if ratio > 0 {
			text = fmt.Sprintf("%+.1f %%", 100*(ratio-1))
		}
		c.changes = append(c.changes, difference{n.Name, what, was, is, text})
	}
	known := min(len(o.Rounds), len(n.Rounds)) >= noisyRounds
	c.unknown = c.unknown || !known
	if known {
		oldLeast, oldMost := o.noise()
		least, most := n.noise()
		if least > oldMost || most < oldLeast {
			add("step", digits(o.StepSecondsMedian)+" s", digits(n.StepSecondsMedian)+" s", n.StepSecondsMedian/o.StepSecondsMedian)
		}
	}
	if a, b := float64(o.ResidentBytes), float64(n.ResidentBytes); known && a > 0 && b > 0 && math.Abs(a-b) > max(0.02*a, residentNoise) {
		add("resident", plan.Bytes(o.ResidentBytes), plan.Bytes(n.ResidentBytes), b/a)
	}
	for _, exact := range []struct {
		what string
		a, b int64
	}{{"planned", o.PlannedBytes, n.PlannedBytes}, {"touched", o.DevicePeakBytes, n.DevicePeakBytes}, {"sent", o.CommBytesPerStep, n.CommBytesPerStep}} {
		if exact.a != exact.b {
			add(exact.what, plan.Bytes(exact.a), plan.Bytes(exact.b), float64(exact.b)/float64(max(exact.a, 1)))
		}
	}
	if k := min(len(o.Losses), len(n.Losses)); !slices.Equal(o.Losses[:k], n.Losses[:k]) {
		at := 0
		for o.Losses[at] == n.Losses[at] {
			at++
		}
		add(fmt.Sprintf("loss, step %d", at+1), fmt.Sprint(o.Losses[at]), fmt.Sprint(n.Losses[at]), 0)
	}
	if len(c.changes) == before {
		c.same++
	}
}

// lines formats the changes for people.
func (c *compared) lines() (lines []string) {
	head := fmt.Sprintf("Compared with %s: ", c.with)
	switch {
	case c.unknown && len(c.changes) > 0:
		lines = append(lines, head+fmt.Sprintf("%d changes of what has no noise, %d rows without one.", len(c.changes), c.same))
	case c.unknown:
		lines = append(lines, head+"what has no noise is the same.")
	case len(c.changes) > 0:
		lines = append(lines, head+fmt.Sprintf("%d changes beyond noise, %d rows without one.", len(c.changes), c.same))
	case c.same > 0:
		lines = append(lines, head+"nothing changed beyond noise.")
	default:
		lines = append(lines, head+"no row is of the same job.")
	}
	for _, d := range c.changes {
		lines = append(lines, fmt.Sprintf("  %s, %s: %s, was %s %s", d.row, d.what, d.now, d.old, d.change))
	}
	lines = append(lines, c.notes...)
	if c.unknown {
		lines = append(lines, fmt.Sprintf("The noise of times and of resident memory is not known from fewer than %d rounds; "+
			"give --rounds %[1]d or more to both runs.", noisyRounds))
	}
	return append(lines, "A time has changed where the medians of the rounds do not overlap, resident memory from 2 % and 8 MiB on, the rest at any difference.")
}

func (c *compared) table() page.Table {
	t := page.Table{Title: "What changed since " + c.with, Mark: -1, Head: []string{"row", "what", "before", "now", "change"}}
	for _, d := range c.changes {
		t.Rows = append(t.Rows, []string{d.row, d.what, d.old, d.now, d.change})
	}
	return t
}
