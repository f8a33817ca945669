package cost

import (
	"math"

	"github.com/spillway-ml/spillway/graph"
)

// Class is a set of operations with the same rates: those of one kind, products and attention by
// the type of their operands, or the copies between two spaces.
type Class string

// CopyClass is the class of copies from one space to another.
func CopyClass(from, to graph.Space) Class {
	return Class(string(graph.Copy) + " " + from.String() + " to " + to.String())
}

// ClassOf returns the class of an operation.
func ClassOf(p *graph.Program, op *graph.Op) Class {
	if op.Kind == graph.Copy {
		return CopyClass(p.Buf(op.In[0]).Space, p.Buf(op.Out[0].Buf).Space)
	}
	class := Class(op.Kind)
	if !IsProduct(op) {
		return class
	}
	d := p.Buf(op.In[0]).DType
	if a, ok := op.Attr.(graph.LinearAttr); ok && a.Int8 {
		d = graph.I8
	}
	if d == graph.F32 {
		return class
	}
	return class + " " + Class(d.String())
}

// Size has the quantities on which the time of an operation depends.
type Size struct {
	Flops float64 `json:"flops"` // as in graph.Cost
	Bytes float64 `json:"bytes"` // as in graph.Cost; for a copy, the bytes copied; for a collective, the bytes that the rank sends
}

// SizeOf returns the size of one execution of an operation on one rank.
func SizeOf(p *graph.Program, op *graph.Op) Size {
	if sent, ok := Sent(p, op); ok {
		return Size{Bytes: float64(sent)}
	}
	if op.Kind == graph.Copy {
		return Size{Bytes: float64(p.Buf(op.Out[0].Buf).Bytes())}
	}
	flops, bytes := graph.Cost(p, op)
	return Size{Flops: float64(flops), Bytes: float64(bytes)}
}

// Rate is the time of a class: PerOp + flops·PerFlop + bytes·PerByte, in s.
type Rate struct {
	PerOp   float64 `json:"per_op"`
	PerFlop float64 `json:"per_flop"`
	PerByte float64 `json:"per_byte"`
}

// Of is the time of an operation of that size. Conversions round products, here and below:
// compilers for some CPUs would otherwise fuse them with sums, and predictions would differ.
func (r Rate) Of(s Size) float64 {
	return r.PerOp + float64(s.Flops*r.PerFlop) + float64(s.Bytes*r.PerByte)
}

// Rates are a class's parts of Work.
type Rates struct {
	Alone Rate `json:"alone"`
	Core  Rate `json:"core"`
	Disk  Rate `json:"disk"`
}

func (r Rates) work(s Size) Work {
	w := Work{Alone: r.Alone.Of(s), Core: r.Core.Of(s), Disk: r.Disk.Of(s)}
	// It can't take less alone than its share of the disk, nor leave cores unused
	// that it would have needed.
	w.Alone = max(w.Alone, w.Disk)
	return w
}

// Sample is a measured time of an operation of a size.
type Sample struct {
	Class   Class
	Size    Size
	Seconds float64
}

// Samples are the measurements of a calibration.
type Samples struct {
	Alone []Sample // s, with nothing else on the machine
	Core  []Sample // s of a core, with all cores busy
	Disk  []Sample // s of the disk, with all of it busy
}

// Calibration is the CPU device as measured.
type Calibration struct {
	Threads int             `json:"threads"`
	Rates   map[Class]Rates `json:"rates"`
	// See Machine; s.
	Start   float64 `json:"start"`
	Gap     float64 `json:"gap"`
	Handoff float64 `json:"handoff"`
	Wait    Rate    `json:"wait"`
	Crowded Rate    `json:"crowded"` // in place of Wait, if there are more ranks than processor cores
}

// Fit finds the rates that are closest to the samples. A class without samples
// of one of the three parts has none of it.
func Fit(threads int, s Samples) *Calibration {
	c := &Calibration{Threads: threads, Rates: map[Class]Rates{}}
	for _, part := range []struct {
		samples []Sample
		of      func(r *Rates) *Rate
	}{
		{s.Alone, func(r *Rates) *Rate { return &r.Alone }},
		{s.Core, func(r *Rates) *Rate { return &r.Core }},
		{s.Disk, func(r *Rates) *Rate { return &r.Disk }},
	} {
		byClass := map[Class][]Sample{}
		for _, one := range part.samples {
			if one.Seconds > 0 {
				byClass[one.Class] = append(byClass[one.Class], one)
			}
		}
		for class, list := range byClass {
			r := c.Rates[class]
			*part.of(&r) = fit(list)
			c.Rates[class] = r
		}
	}
	return c
}

// fit minimises Σ (r(size) − t)²/t over rates without negative parts: the minimum over all choices
// of nonzero parts. Samples are weighted by their time, since the sum over a step matters.
func fit(list []Sample) Rate {
	var best Rate
	least := math.Inf(1)
	for parts := 1; parts < 8; parts++ {
		var columns []int
		for k := range 3 {
			if parts>>k&1 == 1 {
				columns = append(columns, k)
			}
		}
		x, ok := leastSquares(list, columns)
		if !ok {
			continue
		}
		r := Rate{x[0], x[1], x[2]}
		sum := 0.0
		for _, s := range list {
			d := r.Of(s.Size) - s.Seconds
			sum += d * d / s.Seconds
		}
		if sum < least*(1-1e-9) {
			best, least = r, sum
		}
	}
	return best
}

// leastSquares solves for the parts in columns; false where they do not
// determine each other or one would be negative.
func leastSquares(list []Sample, columns []int) (x [3]float64, ok bool) {
	n := len(columns)
	var a [3][4]float64
	var scale [3]float64
	value := func(s Sample, k int) float64 {
		return [3]float64{1, s.Size.Flops, s.Size.Bytes}[columns[k]]
	}
	for k := range n {
		for _, s := range list {
			scale[k] = max(scale[k], value(s, k))
		}
		if scale[k] == 0 {
			return x, false
		}
	}
	for _, s := range list {
		for i := range n {
			vi := value(s, i) / scale[i] / s.Seconds
			for j := range n {
				a[i][j] += vi * value(s, j) / scale[j]
			}
			a[i][n] += float64(vi * s.Seconds)
		}
	}
	for i := range n { // Gauss with pivots of the diagonal: the matrix is positive definite
		if a[i][i] <= 1e-9*a[0][0] {
			return x, false
		}
		for k := range n {
			if k == i {
				continue
			}
			f := a[k][i] / a[i][i]
			for j := i; j <= n; j++ {
				a[k][j] -= float64(f * a[i][j])
			}
		}
	}
	for i := range n {
		v := a[i][n] / a[i][i] / scale[i]
		if v < 0 || math.IsNaN(v) || math.IsInf(v, 0) {
			return x, false
		}
		x[columns[i]] = v
	}
	return x, true
}

// Machine returns one of the given number of ranks of a process on the calibrated device; they
// share its cores.
func (c *Calibration) Machine(ranks int) *Machine {
	m := CPU(c.Threads, ranks)
	m.Name = "cpu, calibrated"
	m.Measured = c.Rates
	m.Start, m.Gap, m.Handoff = c.Start, c.Gap, c.Handoff
	switch {
	case ranks > c.Threads:
		m.Wait = c.Crowded
	case ranks > 1:
		m.Wait = c.Wait
	}
	return m
}
