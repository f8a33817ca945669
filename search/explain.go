package search

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/plan"
)

// Explanation lists what a plan recomputes and what it keeps off the device, according to its
// program.
type Explanation struct {
	Recomputed []BufferGroup // activations of a micro-batch that are recomputed
	Parked     []BufferGroup // activations of a micro-batch that wait off the device
	Placed     []ClassPlace  // units' states that rest off the device
	// RecomputeSeconds is the predicted time of recomputation in a step.
	RecomputeSeconds float64
}

// BufferGroup is a group of buffers that differ only in their layer.
type BufferGroup struct {
	Buffers string      `json:"buffers"` // a pattern of names (graph.MatchName)
	Count   int         `json:"count"`
	Bytes   int64       `json:"bytes"`
	Space   graph.Space `json:"-"` // where they wait
	lo, hi  int         // layers
}

// ClassPlace is the memory space in which a part of a class of units' buffers rests.
type ClassPlace struct {
	Class    graph.Class
	Space    graph.Space
	Units    int   // units in this space
	Of       int   // of all
	Bytes    int64 // of a rank, in this space
	AllBytes int64
}

// Explain explains a plan from its program; step is the predicted run of its step.
func Explain(pl *plan.Plan, step *cost.Run) Explanation {
	p := pl.Program // of all stages
	e := Explanation{RecomputeSeconds: step.Pass[graph.Recompute]}
	groups := map[string]*BufferGroup{}
	add := func(list *[]string, kind, name string, b *graph.Buffer, space graph.Space) {
		key, layer, bytes := name, -1, b.Bytes()
		block := p.BlockOf(b.Unit)
		if before, after, ok := block.Cut(name); ok {
			key, layer = before+"*"+after, block.Index
		}
		id := kind + key
		g := groups[id]
		if g == nil {
			g = &BufferGroup{Buffers: key, Space: space, lo: layer, hi: layer}
			groups[id] = g
			*list = append(*list, id)
		}
		g.Count++
		g.Bytes += bytes
		g.lo, g.hi = min(g.lo, layer), max(g.hi, layer)
	}
	var again, parked []string
	for id := range p.Buffers {
		b := &p.Buffers[id]
		if b.View != nil || b.Class != graph.Activations || b.Micro > 0 {
			continue
		}
		name, suffix, _ := strings.Cut(b.Name, "/recompute")
		switch {
		case name != b.Name && suffix == "":
			add(&again, "again ", name, b, graph.Device)
		case b.Space != graph.Device:
			name, _, _ = strings.Cut(b.Name, "@")
			add(&parked, b.Space.String()+" ", name, b, b.Space)
		}
	}
	finish := func(ids []string) (list []BufferGroup) {
		var most int64
		for _, id := range ids {
			most = max(most, groups[id].Bytes)
		}
		for _, id := range ids {
			g := *groups[id]
			if g.Bytes*64 < most { // statistics go with what they belong to
				continue
			}
			if g.lo >= 0 && g.Count == g.hi-g.lo+1 {
				g.Buffers = strings.Replace(g.Buffers, "*", layersText(g.lo, g.hi), 1)
			}
			list = append(list, g)
		}
		slices.SortStableFunc(list, func(a, b BufferGroup) int {
			return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Buffers, b.Buffers))
		})
		return list
	}
	e.Recomputed, e.Parked = finish(again), finish(parked)
	role := pl.Largest(graph.Device)
	e.Placed = placed(role.Program, role.Layout.Offset)
	return e
}

// placed sums, by class and space, the units' buffers that have an offset off the device.
func placed(p *graph.Program, offset []int64) []ClassPlace {
	type key struct {
		class graph.Class
		space graph.Space
	}
	sums := map[key]*ClassPlace{}
	seen := map[key]map[int]bool{}
	units := map[graph.Class]map[int]bool{}
	all := map[graph.Class]int64{}
	for id := range p.Buffers {
		b := &p.Buffers[id]
		if b.View != nil || b.Unit < 0 || b.Life == graph.LifePhase || offset[id] < 0 || b.Class != graph.Optimizer && b.Class != graph.Parameters && b.Class != graph.Gradients {
			continue
		}
		all[b.Class] += b.Bytes()
		if units[b.Class] == nil {
			units[b.Class] = map[int]bool{}
		}
		units[b.Class][b.Unit] = true
		if b.Space == graph.Device {
			continue
		}
		k := key{b.Class, b.Space}
		if sums[k] == nil {
			sums[k], seen[k] = &ClassPlace{Class: k.class, Space: k.space}, map[int]bool{}
		}
		sums[k].Bytes += b.Bytes()
		seen[k][b.Unit] = true
	}
	var list []ClassPlace
	for k, c := range sums {
		c.Units, c.Of, c.AllBytes = len(seen[k]), len(units[k.class]), all[k.class]
		list = append(list, *c)
	}
	slices.SortFunc(list, func(a, b ClassPlace) int {
		return cmp.Or(cmp.Compare(a.Class, b.Class), cmp.Compare(a.Space, b.Space))
	})
	return list
}

// Lines returns the explanation as text; nothing if the plan neither recomputes nor offloads.
func (e Explanation) Lines() (lines []string) {
	names := func(list []BufferGroup) (text string, bytes int64, count int) {
		var parts []string
		for i, g := range list {
			bytes += g.Bytes
			count += g.Count
			if i < 6 {
				parts = append(parts, fmt.Sprintf("%s (%s)", g.Buffers, plan.Bytes(g.Bytes)))
			}
		}
		if n := len(list) - 6; n > 0 {
			parts = append(parts, fmt.Sprintf("%d more kinds", n))
		}
		return strings.Join(parts, ", "), bytes, count
	}
	if text, bytes, count := names(e.Recomputed); count > 0 {
		lines = append(lines, fmt.Sprintf("computed again: %d activations, %s of a micro-batch, %s a step: %s", count, plan.Bytes(bytes), secondsText(e.RecomputeSeconds), text))
	}
	for _, space := range []graph.Space{graph.Host, graph.Disk} {
		var list []BufferGroup
		for _, g := range e.Parked {
			if g.Space == space {
				list = append(list, g)
			}
		}
		if text, bytes, count := names(list); count > 0 {
			lines = append(lines, fmt.Sprintf("parked in %s memory: %d activations, %s of a micro-batch: %s", space, count, plan.Bytes(bytes), text))
		}
	}
	for _, c := range e.Placed {
		lines = append(lines, fmt.Sprintf("%s of %d of %d units in %s memory: %s of %s a rank", c.Class, c.Units, c.Of, c.Space, plan.Bytes(c.Bytes), plan.Bytes(c.AllBytes)))
	}
	return lines
}

// secondsText formats a time with three digits and a suitable unit.
func secondsText(v float64) string {
	switch {
	case v >= 1:
		return fmt.Sprintf("%.3g s", v)
	case v >= 1e-3:
		return fmt.Sprintf("%.3g ms", v*1e3)
	}
	return fmt.Sprintf("%.3g µs", v*1e6)
}
