// Command breakdown adds up a trace of `spillway train --trace FILE` by kind of
// operation and stream: where a step's time goes.
//
//	go run ./benchmarks/breakdown FILE
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"text/tabwriter"
)

type event struct {
	Name string
	Ph   string
	Pid  int
	Tid  int
	Dur  float64 // µs
	Args struct {
		Kind    string
		Section string
		Pass    string
		Name    string
	}
}

type total struct {
	stream, kind, pass string
	calls              int
	us                 float64
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: breakdown TRACE.json")
		os.Exit(1)
	}
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "breakdown:", err)
		os.Exit(1)
	}
}

func run(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var trace struct{ TraceEvents []event }
	if err := json.Unmarshal(text, &trace); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	streams := map[[2]int]string{}
	sums := map[[3]string]*total{}
	var all float64
	for _, e := range trace.TraceEvents {
		id := [2]int{e.Pid, e.Tid}
		switch {
		case e.Ph == "M" && e.Name == "thread_name":
			streams[id] = e.Args.Name
		case e.Ph == "X" && e.Args.Section == "step":
			key := [3]string{streams[id], e.Args.Kind, e.Args.Pass}
			if sums[key] == nil {
				sums[key] = &total{stream: key[0], kind: key[1], pass: key[2]}
			}
			sums[key].calls++
			sums[key].us += e.Dur
			if streams[id] == "compute" {
				all += e.Dur
			}
		}
	}
	var list []*total
	for _, t := range sums {
		list = append(list, t)
	}
	slices.SortFunc(list, func(a, b *total) int {
		switch {
		case a.us > b.us:
			return -1
		case a.us < b.us:
			return 1
		}
		return 0
	})
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "stream\toperation\tpass\tcalls\tms\tof compute\t")
	for _, t := range list {
		share := "–"
		if t.stream == "compute" {
			share = fmt.Sprintf("%.1f %%", 100*t.us/all)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%.1f\t%s\t\n", t.stream, t.kind, t.pass, t.calls, t.us/1000, share)
	}
	return w.Flush()
}
