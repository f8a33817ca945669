package recompute

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/nearest"
)

// markDropped marks the values that a pattern of Drop matches.
func (r *rewriter) markDropped() {
	r.dropped = make([]bool, len(r.vals))
	if len(r.drop) == 0 {
		return
	}
	named := map[graph.BufID]bool{}
	is := func(v int) bool {
		root := r.vals[v].root
		yes, known := named[root]
		if !known {
			yes = slices.ContainsFunc(r.drop, func(pattern string) bool { return matches(pattern, r.p.Buf(root).Name) })
			named[root] = yes
		}
		return yes
	}
	for i := range r.vals {
		v := &r.vals[i]
		if v.by < 0 || r.ops[v.by].Pass != graph.Forward {
			continue
		}
		main := r.outs[v.by][0]
		fused := r.ops[v.by].Kind == graph.Linear // y can be recomputed from its output pre
		r.dropped[i] = is(i) || !fused && main >= 0 && is(main)
	}
}

// idle says whether only clones would read v in the backward. Then v is recomputed too, because
// keeping it to recompute other values would save no memory.
func (r *rewriter) idle(v int) bool {
	val := &r.vals[v]
	if len(r.drop) == 0 || val.keep || val.by < 0 {
		return false
	}
	return !slices.ContainsFunc(val.read, func(i int) bool { return r.ops[i].Pass != graph.Forward })
}

// checkDrops returns an error for a pattern that drops nothing. p is the program before the rewrite.
func (r *rewriter) checkDrops(p *graph.Program) error {
	for _, pattern := range r.drop {
		made := slices.Collect(maps.Keys(r.made))
		if slices.ContainsFunc(made, func(root graph.BufID) bool { return matches(pattern, r.p.Buf(root).Name) }) {
			continue
		}
		list, err := Candidates(p)
		if err != nil {
			return err
		}
		var all, names []string
		for _, c := range list {
			if c.Ops == nil {
				continue
			}
			name := c.Name
			if before, after, ok := p.BlockOf(c.Unit).Cut(name); ok {
				name = before + "*" + after
			}
			all = append(all, c.Name)
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
		return fmt.Errorf("recompute: no activation that can be computed again matches %.80q; the nearest are %s; all of those are %s", pattern, strings.Join(nearest.Patterns(pattern, all, 3), ", "), strings.Join(names, ", "))
	}
	return nil
}

// Candidate is an activation that the forward keeps for the backward.
type Candidate struct {
	Name  string // name of its buffer
	Buf   graph.BufID
	Unit  int
	Bytes int64
	// Ops are the operations that recompute it if all other activations are kept. They are nil if
	// it cannot be dropped, for example because one unit passes it to another.
	Ops []graph.Op
}

// Candidates lists the activations of section "train" that the backward reads, in the order of the
// forward.
func Candidates(p *graph.Program) ([]Candidate, error) {
	train := p.SectionOf(graph.SectionTrain, graph.FormWhole)
	if train.Micro() == nil {
		return nil, fmt.Errorf("recompute: the program has no section \"train\" of one phase")
	}
	r := &rewriter{p: p, ops: train.Phases[0].Ops, policy: make([]Policy, len(p.Units)), drop: []string{"*"}, made: map[graph.BufID]bool{}}
	r.number()
	for v := range r.dropped {
		r.dropped[v] = false
	}
	byRoot := map[graph.BufID]*Candidate{}
	var order []graph.BufID
	for s := range r.stretches() {
		done := map[int]bool{}
		for k := s.first; k <= s.last; k++ {
			for _, v := range r.ins[k] {
				if v < 0 || done[v] || r.vals[v].by < 0 || r.ops[r.vals[v].by].Pass != graph.Forward {
					continue
				}
				done[v] = true
				b := p.Buf(r.vals[v].root)
				if b.Class != graph.Activations || b.Life != graph.LifePhase || b.Space != graph.Device {
					continue
				}
				c := byRoot[r.vals[v].root]
				if c == nil {
					c = &Candidate{Name: b.Name, Buf: r.vals[v].root, Unit: r.ops[r.vals[v].by].Unit, Bytes: b.Bytes()}
					byRoot[r.vals[v].root] = c
					order = append(order, r.vals[v].root)
				}
				if !r.vals[v].keep {
					c.Ops = append(c.Ops, r.again(v, s)...)
				}
			}
		}
	}
	first := map[graph.BufID]int{}
	for i := range r.vals {
		if _, ok := first[r.vals[i].root]; !ok {
			first[r.vals[i].root] = r.vals[i].by
		}
	}
	list := make([]Candidate, 0, len(order))
	for _, root := range order {
		list = append(list, *byRoot[root])
	}
	slices.SortStableFunc(list, func(a, b Candidate) int { return first[a.Buf] - first[b.Buf] })
	return list, nil
}

// again returns the operations that recompute v for a stretch, nil if that is impossible.
func (r *rewriter) again(v int, s stretch) []graph.Op {
	r.dropped[v] = true
	defer func() { r.dropped[v] = false }()
	pl := &planner{r: r, s: s, make: map[int]*clone{}, state: map[int]int8{}}
	if !pl.plan(v) {
		return nil
	}
	var ops []graph.Op
	for _, c := range pl.order {
		op := r.ops[c.op]
		if c.act {
			op = graph.Op{Kind: graph.Activation, Name: op.Name, Attr: graph.ActAttr{Act: op.Attr.(graph.LinearAttr).Act},
				In: []graph.BufID{op.Out[1].Buf}, Out: op.Out[:1], Work: graph.NoBuf, Skip: graph.NoBuf, Unit: op.Unit, Pass: graph.Recompute}
		}
		ops = append(ops, op)
	}
	return ops
}
