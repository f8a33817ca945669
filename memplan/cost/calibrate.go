package cost

import (
	"math"

	"github.com/spillway-ml/spillway/graph"
)

// Sample is one operation that was timed while it ran alone on its process's
// threads.
type Sample struct {
	Kind    graph.Kind
	Flops   int64
	Bytes   int64 // as graph.Cost has it; of a collective: what all ranks together send
	Seconds float64
}

// Calibration is the CPU device as measured: a straight line a kind.
type Calibration struct {
	Threads int
	Rates   map[graph.Kind]Rate
}

// byFlops are the kinds whose time follows their arithmetic; that of the others
// follows their traffic.
var byFlops = map[graph.Kind]bool{
	graph.Linear: true, graph.LinearGradX: true, graph.LinearGradW: true, graph.HeadLoss: true, graph.HeadLossGrad: true,
	graph.Attention: true, graph.AttentionGrad: true,
}

// Fit draws the line t = a + b·x through each kind's samples that has the least
// relative squares, with neither a nor b negative.
func Fit(threads int, samples []Sample) *Calibration {
	c := &Calibration{Threads: threads, Rates: map[graph.Kind]Rate{}}
	byKind := map[graph.Kind][]Sample{}
	for _, s := range samples {
		if s.Seconds > 0 {
			byKind[s.Kind] = append(byKind[s.Kind], s)
		}
	}
	for kind, list := range byKind {
		x := func(s Sample) float64 {
			if byFlops[kind] {
				return float64(s.Flops)
			}
			return float64(s.Bytes)
		}
		a, b := line(list, x)
		r := Rate{PerOp: a, PerByte: b}
		if byFlops[kind] {
			r = Rate{PerOp: a, PerFlop: b}
		}
		c.Rates[kind] = r
	}
	return c
}

// line minimises Σ ((a + b·x − t)/t)².
func line(list []Sample, x func(Sample) float64) (a, b float64) {
	var w, wx, wxx, wt, wxt float64
	for _, s := range list {
		k, v := 1/(s.Seconds*s.Seconds), x(s)
		w += k
		wx += k * v
		wxx += k * v * v
		wt += k * s.Seconds
		wxt += k * v * s.Seconds
	}
	slope := func() float64 { // through the origin
		if wxx == 0 {
			return 0
		}
		return wxt / wxx
	}
	det := w*wxx - wx*wx
	if !(det > 1e-9*w*wxx) {
		if wxx > 0 {
			return 0, slope()
		}
		return wt / w, 0
	}
	a, b = (wt*wxx-wx*wxt)/det, (w*wxt-wx*wt)/det
	switch {
	case a < 0:
		return 0, slope()
	case b < 0 || math.IsNaN(b):
		return wt / w, 0
	}
	return a, b
}

// Machine returns one of so many ranks of a process on the calibrated device:
// they share its threads, so each takes as many times as long.
func (c *Calibration) Machine(ranks int) *Machine {
	m := CPU(c.Threads, ranks)
	m.Name = "cpu, calibrated"
	m.Measured = map[graph.Kind]Rate{}
	n := float64(max(ranks, 1))
	// Small operations of different ranks run on different threads.
	each := max(1, n/float64(max(c.Threads, 1)))
	for kind, r := range c.Rates {
		m.Measured[kind] = Rate{PerOp: r.PerOp * each, PerFlop: r.PerFlop * n, PerByte: r.PerByte * n}
	}
	return m
}
