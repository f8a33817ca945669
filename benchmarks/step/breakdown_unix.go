//go:build unix

package main

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"slices"
	"text/tabwriter"

	"github.com/spillway-ml/spillway/benchmarks/bench"
)

// breakdown prints how the time of a trace is spent, and how much of it is hidden.
func breakdown(path string) error {
	spans, err := bench.ReadTrace(path)
	if err != nil {
		return err
	}
	type key struct{ stream, kind, pass string }
	type sum struct {
		calls int
		us    float64
	}
	sums, all := map[key]sum{}, 0.0
	for _, e := range spans {
		k := key{e.Stream, e.Kind, e.Pass}
		sums[k] = sum{sums[k].calls + 1, sums[k].us + e.End - e.Start}
		if e.Stream == "compute" {
			all += e.End - e.Start
		}
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "stream\toperation\tpass\tcalls\tms\tof compute\t")
	for _, k := range slices.SortedFunc(maps.Keys(sums), func(a, b key) int { return cmp.Compare(sums[b].us, sums[a].us) }) {
		share := "–"
		if k.stream == "compute" {
			share = fmt.Sprintf("%.1f %%", 100*sums[k].us/all)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%.1f\t%s\t\n", k.stream, k.kind, k.pass, sums[k].calls, sums[k].us/1000, share)
	}
	fmt.Fprintln(w, "\nstream\tms\tunder compute\t")
	for _, o := range bench.Overlaps(spans) {
		fmt.Fprintf(w, "%s\t%.1f\t%.1f %%\t\n", o.Stream, o.Busy/1000, 100*o.Hidden/o.Busy)
	}
	return w.Flush()
}
