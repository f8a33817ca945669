package bench

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"slices"
)

// Span is one operation of section "step" in a trace.
type Span struct {
	Rank                     int
	Stream, Kind, Pass, Name string
	Start, End               float64 // µs
}

// ReadTrace returns the operations of section "step" in a trace of spillway train.
func ReadTrace(path string) ([]Span, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var trace struct {
		TraceEvents []struct {
			Name, Ph string
			Pid, Tid int
			Ts, Dur  float64 // µs
			Args     struct{ Kind, Section, Pass, Name string }
		}
	}
	if err := json.Unmarshal(text, &trace); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	streams := map[[2]int]string{}
	for _, e := range trace.TraceEvents {
		if e.Ph == "M" && e.Name == "thread_name" {
			streams[[2]int{e.Pid, e.Tid}] = e.Args.Name
		}
	}
	var list []Span
	for _, e := range trace.TraceEvents {
		if e.Ph == "X" && e.Args.Section == "step" {
			list = append(list, Span{e.Pid, streams[[2]int{e.Pid, e.Tid}], e.Args.Kind, e.Args.Pass, e.Name, e.Ts, e.Ts + e.Dur})
		}
	}
	return list, nil
}

// Overlap is the time in which a stream worked, and the part of it in which its rank's compute
// stream worked too, in µs.
type Overlap struct {
	Stream       string
	Busy, Hidden float64
}

// Overlaps returns all streams except the compute stream, the busiest first.
func Overlaps(spans []Span) (list []Overlap) {
	computing := map[int][]Span{} // by rank, in order of time
	sums := map[string]*Overlap{}
	for _, e := range spans {
		if e.Stream == "compute" {
			computing[e.Rank] = append(computing[e.Rank], e)
		} else if sums[e.Stream] == nil {
			sums[e.Stream] = &Overlap{Stream: e.Stream}
		}
	}
	for _, c := range computing {
		slices.SortFunc(c, func(a, b Span) int { return cmp.Compare(a.Start, b.Start) })
	}
	for _, e := range spans {
		if e.Stream == "compute" {
			continue
		}
		o := sums[e.Stream]
		o.Busy += e.End - e.Start
		c := computing[e.Rank]
		from, _ := slices.BinarySearchFunc(c, e.Start, func(c Span, at float64) int { return cmp.Compare(c.End, at) })
		for _, c := range c[from:] {
			if c.Start >= e.End {
				break
			}
			o.Hidden += max(0, min(c.End, e.End)-max(c.Start, e.Start))
		}
	}
	for _, o := range sums {
		list = append(list, *o)
	}
	slices.SortFunc(list, func(a, b Overlap) int { return cmp.Compare(b.Busy, a.Busy) })
	return list
}
