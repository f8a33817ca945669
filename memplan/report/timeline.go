// Package report shows a plan to people: memory over time, buffer by buffer, as
// a page that needs nothing but itself.
package report

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan"
)

// Timeline has the buffers that are live in one space over one run of a section, in program
// order.
type Timeline struct {
	Space   graph.Space
	Section string
	Extent  int64 // bytes of the arena
	Columns []Column
	Buffers []Buffer // alive in some column; by class, and within one those that live longest first
	Peak    int      // index of the column where most is alive
}

// Column stands for a few steps of the trace: of those, the one where most is
// alive.
type Column struct {
	Step  int    // of the trace
	Label string // phase/operation
	Pass  graph.Pass
	Bytes [graph.NumClasses]int64
	Total int64
}

// Buffer is a root buffer and the columns [from, to] in which it is alive.
type Buffer struct {
	Name  string
	Class graph.Class
	Bytes int64
	Shape string
	Lives [][2]int
}

// Columns is the usual resolution of a timeline.
const Columns = 300

// NewTimeline follows the buffers of one space through a section, in so many columns at most.
func NewTimeline(p *graph.Program, l *memplan.Layout, section string, sp graph.Space, columns int) (*Timeline, error) {
	sec := p.Section(section)
	if sec == nil {
		return nil, fmt.Errorf("report: the program has no section %q", section)
	}
	regions, err := graph.NewRegions(p)
	if err != nil {
		return nil, fmt.Errorf("report: %w", err)
	}
	trace, err := graph.NewTrace(p, regions, sec)
	if err != nil {
		return nil, fmt.Errorf("report: %w", err)
	}
	t := &Timeline{Space: sp, Section: section, Extent: l.Spaces[sp].Peak}
	n := len(trace.Steps)
	if n == 0 || t.Extent == 0 {
		return t, nil
	}
	lives := livesOf(p, l, trace, sp)
	column := t.choose(p, sec, trace, lives, columns)
	t.fill(p, lives, column)
	slices.SortStableFunc(t.Buffers, func(a, b Buffer) int {
		span := func(x Buffer) (s int) {
			for _, v := range x.Lives {
				s += v[1] - v[0]
			}
			return s
		}
		return cmp.Or(cmp.Compare(a.Class, b.Class), cmp.Compare(span(b), span(a)))
	})
	return t, nil
}

// life is the first and last step of one of a buffer's lives.
type life struct {
	id       graph.BufID
	from, to int
}

// livesOf returns the lives of the buffers of a space that have a place.
func livesOf(p *graph.Program, l *memplan.Layout, trace *graph.Trace, sp graph.Space) (lives []life) {
	for id := range p.Buffers {
		if b := &p.Buffers[id]; b.View == nil && b.Life == graph.LifeRun && b.Space == sp && l.Offset[id] >= 0 {
			lives = append(lives, life{graph.BufID(id), 0, len(trace.Steps) - 1})
		}
	}
	for _, r := range trace.LiveRanges() {
		if p.Buf(r.Buf).Space == sp && l.Offset[r.Buf] >= 0 {
			lives = append(lives, life{r.Buf, int(r.Steps[0]), int(r.Steps[len(r.Steps)-1])})
		}
	}
	return lives
}

// choose makes the columns, each of the step among its own at which most is live, and
// returns the column of every step.
func (t *Timeline) choose(p *graph.Program, sec *graph.Section, trace *graph.Trace, lives []life, columns int) (column []int) {
	n := len(trace.Steps)
	// Live bytes by step, as differences.
	totals := make([]int64, n+1)
	for _, v := range lives {
		totals[v.from] += p.Buf(v.id).Bytes()
		totals[v.to+1] -= p.Buf(v.id).Bytes()
	}
	for i := 1; i <= n; i++ {
		totals[i] += totals[i-1]
	}
	columns = min(n, columns)
	column = make([]int, n)
	for c := range columns {
		lo, hi := c*n/columns, (c+1)*n/columns
		best := lo
		for i := lo; i < hi; i++ {
			column[i] = c
			if totals[i] > totals[best] {
				best = i
			}
		}
		step := trace.Steps[best]
		op := trace.Op(best)
		t.Columns = append(t.Columns, Column{Step: best, Label: sec.Phases[step.Phase].Name + "/" + op.Name, Pass: op.Pass, Total: totals[best]})
		if totals[best] > t.Columns[t.Peak].Total {
			t.Peak = c
		}
	}
	return column
}

// fill gives the columns their bytes, and the timeline its buffers.
func (t *Timeline) fill(p *graph.Program, lives []life, column []int) {
	index := map[graph.BufID]int{}
	for _, v := range lives {
		// The columns whose own step lies in the life.
		from, to := column[v.from], column[v.to]
		if t.Columns[from].Step < v.from {
			from++
		}
		if t.Columns[to].Step > v.to {
			to--
		}
		if from > to {
			continue
		}
		b := p.Buf(v.id)
		for c := from; c <= to; c++ {
			t.Columns[c].Bytes[b.Class] += b.Bytes() - b.Pad
			t.Columns[c].Bytes[graph.Padding] += b.Pad
		}
		k, ok := index[v.id]
		if !ok {
			k = len(t.Buffers)
			index[v.id] = k
			t.Buffers = append(t.Buffers, Buffer{Name: b.Name, Class: b.Class, Bytes: b.Bytes(), Shape: fmt.Sprint(b.DType, b.Shape)})
		}
		t.Buffers[k].Lives = append(t.Buffers[k].Lives, [2]int{from, to})
	}
}
