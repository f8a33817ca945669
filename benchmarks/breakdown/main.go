// Command breakdown adds up a trace of `spillway train --trace FILE` by kind of
// operation and stream, where a step's time goes, and says of every other stream
// how much of its time lies under computing.
//
//	go run ./benchmarks/breakdown FILE
package main

import (
	"cmp"
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
	Ts   float64 // µs
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
	events, err := read(path)
	if err != nil {
		return err
	}
	if err := byKind(events); err != nil {
		return err
	}
	fmt.Println()
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "stream\tms\tunder compute\t")
	for _, o := range overlaps(events) {
		fmt.Fprintf(w, "%s\t%.1f\t%.1f %%\t\n", o.stream, o.us/1000, 100*o.under/o.us)
	}
	return w.Flush()
}

// span is one operation of the step.
type span struct {
	rank                       int
	stream, kind, pass, called string
	start, end                 float64 // µs
}

// read returns the operations of section "step" in a trace.
func read(path string) ([]span, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var trace struct{ TraceEvents []event }
	if err := json.Unmarshal(text, &trace); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	streams := map[[2]int]string{}
	for _, e := range trace.TraceEvents {
		if e.Ph == "M" && e.Name == "thread_name" {
			streams[[2]int{e.Pid, e.Tid}] = e.Args.Name
		}
	}
	var list []span
	for _, e := range trace.TraceEvents {
		if e.Ph == "X" && e.Args.Section == "step" {
			list = append(list, span{e.Pid, streams[[2]int{e.Pid, e.Tid}], e.Args.Kind, e.Args.Pass, e.Name, e.Ts, e.Ts + e.Dur})
		}
	}
	return list, nil
}

// overlap is how long a stream worked, and how much of that while its rank's
// compute stream did.
type overlap struct {
	stream    string
	us, under float64
}

// overlaps returns the streams but the compute stream, by their time.
func overlaps(events []span) []overlap {
	computing := map[int][]span{} // by rank, in order of time
	sums := map[string]*overlap{}
	for _, e := range events {
		if e.stream == "compute" {
			computing[e.rank] = append(computing[e.rank], e)
		} else if sums[e.stream] == nil {
			sums[e.stream] = &overlap{stream: e.stream}
		}
	}
	for _, list := range computing {
		slices.SortFunc(list, func(a, b span) int { return cmp.Compare(a.start, b.start) })
	}
	for _, e := range events {
		if e.stream == "compute" {
			continue
		}
		o := sums[e.stream]
		o.us += e.end - e.start
		list := computing[e.rank]
		from, _ := slices.BinarySearchFunc(list, e.start, func(c span, at float64) int { return cmp.Compare(c.end, at) })
		for _, c := range list[from:] {
			if c.start >= e.end {
				break
			}
			o.under += max(0, min(c.end, e.end)-max(c.start, e.start))
		}
	}
	var out []overlap
	for _, o := range sums {
		out = append(out, *o)
	}
	slices.SortFunc(out, func(a, b overlap) int { return cmp.Compare(b.us, a.us) })
	return out
}

// byKind prints where the time goes.
func byKind(events []span) error {
	sums := map[[3]string]*total{}
	var all float64
	for _, e := range events {
		key := [3]string{e.stream, e.kind, e.pass}
		if sums[key] == nil {
			sums[key] = &total{stream: key[0], kind: key[1], pass: key[2]}
		}
		sums[key].calls++
		sums[key].us += e.end - e.start
		if e.stream == "compute" {
			all += e.end - e.start
		}
	}
	var list []*total
	for _, t := range sums {
		list = append(list, t)
	}
	slices.SortFunc(list, func(a, b *total) int { return cmp.Compare(b.us, a.us) })
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
