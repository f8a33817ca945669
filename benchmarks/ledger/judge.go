package main

import (
	"fmt"
	"io"
	"math"
	"text/tabwriter"
)

// last is how many steps the training loss at the end is the mean of: one step's
// scatters by a tenth.
const last = 50

// bar is how much worse than its baseline a row may be at the end, as a share; +Inf:
// it is shown and not judged.
type bar struct {
	row, against string
	most         float64
	refused      bool // a control: it must not hold the bar
}

var bars = []bar{
	{"bf16", "fp32", 0.005, false},
	{"fp16", "fp32", 0.005, false},
	{"optimizer", "bf16", 0.01, false},
	{"gather", "bf16", 0.01, false},
	{"reduce", "bf16", 0.01, false},
	{"activations", "bf16", 0.01, false},
	{"matmul", "bf16", 0.01, false},
	{"all", "bf16", 0.02, false},
	{"linear map", "bf16", 0.01, true},
	{"gather scales swapped", "bf16", 0.01, true},
	{"matmul scales swapped", "bf16", 0.01, true},
	{"moments scales swapped", "bf16", math.Inf(1), false}, // the page says why
	{"fp16 without backoff", "fp32", 0.005, true},
}

// verdict is a bar and what came of it, over the seeds that the row has.
type verdict struct {
	bar
	seeds          int
	held, train    float64 // the means of the row's losses at the end; +Inf: a run ended early
	heldBy         float64 // over the baseline's mean of the same seeds, less 1
	trainBy        float64
	least, largest float64 // of heldBy by seed
	endedWith      string
	holds, asMust  bool
}

// judge compares by the mean over seeds, to one side: noise of a few hundredths of a nat
// at a seed is as large as the bars, and a row that came out better lost nothing. A row
// must hold its bar with both losses.
func judge(l ledger) ([]verdict, error) {
	var all []verdict
	for _, b := range bars {
		v := verdict{bar: b, least: math.Inf(1), largest: math.Inf(-1)}
		var heldOf, trainOf float64 // sums of the baseline
		for _, c := range l.Runs {
			if c.Row != b.row {
				continue
			}
			base, ok := l.find(b.against, c.Seed)
			if !ok {
				continue // to be run
			}
			if base.Ended != "" {
				return nil, fmt.Errorf("%s, seed %d: the run of %s to compare it with ended early: %s", b.row, c.Seed, b.against, base.Ended)
			}
			held, train := c.end(l.Steps)
			baseHeld, baseTrain := base.end(l.Steps)
			v.seeds++
			v.held, v.train = v.held+held, v.train+train
			heldOf, trainOf = heldOf+baseHeld, trainOf+baseTrain
			v.least, v.largest = min(v.least, held/baseHeld-1), max(v.largest, held/baseHeld-1)
			if c.Ended != "" {
				v.endedWith = c.Ended
			}
		}
		if v.seeds == 0 {
			continue // not run yet: printed tells so
		}
		v.heldBy, v.trainBy = v.held/heldOf-1, v.train/trainOf-1
		v.held, v.train = v.held/float64(v.seeds), v.train/float64(v.seeds)
		v.holds = v.heldBy <= b.most && v.trainBy <= b.most
		v.asMust = v.holds != b.refused
		all = append(all, v)
	}
	return all, nil
}

func (l ledger) find(row string, seed int) (curve, bool) {
	for _, c := range l.Runs {
		if c.Row == row && c.Seed == seed {
			return c, true
		}
	}
	return curve{}, false
}

// end returns the held-out loss and the mean training loss at the end.
func (c curve) end(steps int) (held, train float64) {
	if c.Ended != "" || len(c.Train) < steps || steps < last || len(c.Held) == 0 {
		return math.Inf(1), math.Inf(1)
	}
	for _, v := range c.Train[len(c.Train)-last:] {
		train += v / last
	}
	return c.Held[len(c.Held)-1], train
}

// share writes a difference in percent; what is above tenfold is as a multiple.
func share(v float64) string {
	switch {
	case math.IsInf(v, 1):
		return "∞"
	case v > 9:
		return fmt.Sprintf("%.0f ×", v+1)
	}
	return fmt.Sprintf("%+.2f %%", 100*v)
}

// printed writes the table of the page, and tells whether all came out as they must.
func printed(w io.Writer, l ledger, verdicts []verdict) (held bool, err error) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "row\tseeds\theld out\tagainst\tby\tleast to most\ttraining, last 50\tby\tbar\tholds\t")
	var fp32 verdict
	for _, c := range l.Runs {
		if h, tr := c.end(l.Steps); c.Row == "fp32" {
			fp32.seeds, fp32.held, fp32.train = fp32.seeds+1, fp32.held+h, fp32.train+tr
		}
	}
	fmt.Fprintf(t, "fp32\t%d\t%.4f\t\t\t\t%.4f\t\t\t\t\n", fp32.seeds, fp32.held/float64(fp32.seeds), fp32.train/float64(fp32.seeds))
	held = true
	for _, v := range verdicts {
		holds := "yes"
		switch {
		case math.IsInf(v.bar.most, 1):
			holds = "not judged"
		case v.refused && !v.holds:
			holds = "no, as it must"
		case v.refused:
			holds = "YES, A FAULT"
		case !v.holds:
			holds = "NO"
		}
		fmt.Fprintf(t, "%s\t%d\t%.4f\t%s\t%s\t%s\t%.4f\t%s\t%s\t%s\t\n",
			v.row, v.seeds, v.held, v.against, share(v.heldBy), share(v.least)+" to "+share(v.largest), v.train, share(v.trainBy), share(v.bar.most), holds)
		held = held && v.asMust
	}
	if err := t.Flush(); err != nil {
		return false, err
	}
	for _, r := range rows() {
		n := 0
		for seed := 1; seed <= r.seeds; seed++ {
			if _, ok := l.find(r.name, seed); ok {
				n++
			}
		}
		if n < r.seeds {
			fmt.Fprintf(w, "%s: %d of %d seeds so far\n", r.name, n, r.seeds)
		}
	}
	for _, v := range verdicts {
		if v.endedWith != "" {
			fmt.Fprintf(w, "\n%s ended: %s\n", v.row, v.endedWith)
		}
	}
	return held, nil
}
