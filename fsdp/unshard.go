package fsdp

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// stretch is a run of a phase's operations that use one block's parameters, as indices before this
// pass. It ends with the last operation before another block's parameters are used. Its units are
// gathered together, in the order of their first use.
type stretch struct {
	units       []int
	first, last int
}

type gatherKey struct {
	section string
	stretch int
	unit    int
}

type gathered struct {
	whole graph.BufID
	views map[graph.BufID]graph.BufID // by a parameter's value: its view in whole
}

// Unshard gathers the sharded units of a block before every stretch that uses them, into buffers
// that live only for the stretch. With a prefetch distance d, the gather of stretch k starts when
// stretch k−d starts computing, and not before stretch k−d−1 has finished. So at most d+1 blocks
// are gathered at a time:
//
//	comm:     AG 0  AG 1 │      AG 2 │      AG 3 │
//	compute:             stretch 0   stretch 1   stretch 2      (d = 1)
//
// With int8, units with a master are gathered as quantised values (int8.go). A frozen unit stored
// in another type is converted in the same way, at every stage (base.go).
//
// Unshard rewrites every section. The micro-steps of a step share the gathered buffers, as do the
// phases of any other section. Sharded units then have no complete value: Param.Value is NoBuf.
func Unshard(p *graph.Program, prefetch int, int8 bool) (*graph.Program, error) {
	q := p.Clone()
	g := &gatherer{p: q, prefetch: prefetch, int8: int8, owner: map[graph.BufID]int{}, computed: map[int]graph.DType{}, made: map[gatherKey]*gathered{}}
	for i := range q.Params {
		prm := &q.Params[i]
		if prm.Value == graph.NoBuf {
			continue
		}
		if u := &q.Units[prm.Unit]; u.Compute.Axis >= 0 || converted(q, u, prm) {
			g.owner[prm.Value], g.computed[prm.Unit] = prm.Unit, q.Buf(prm.Value).DType
			prm.Value = graph.NoBuf
		}
	}
	if len(g.owner) == 0 {
		return q, nil
	}
	for sec, ph := range q.Phases() {
		if sec.Kind == graph.SectionUpdate { // updates read shards only
			continue
		}
		w := graph.NewEditor(ph)
		g.phase(w, gatherName(sec))
		w.Commit()
	}
	return q, nil
}

// gatherName returns the section's part of the names of gathered buffers.
func gatherName(sec *graph.Section) string {
	if sec.Kind == graph.SectionStep {
		return graph.SectionName(graph.SectionTrain, sec.Form)
	}
	return sec.Name
}

type gatherer struct {
	p        *graph.Program
	prefetch int
	int8     bool                // gather units with a master as quantised values
	owner    map[graph.BufID]int // by whole value: its unit
	computed map[int]graph.DType // by unit: the type of its whole value
	made     map[gatherKey]*gathered
}

// stretches finds the stretches of a phase, in order of their first use.
func (g *gatherer) stretches(w *graph.Editor) []stretch {
	var done, open []stretch
	var reads []int
	for i, n := range w.Base {
		reads = reads[:0]
		for _, id := range n.Op.In {
			if u, ok := g.owner[id]; ok && !slices.Contains(reads, u) {
				reads = append(reads, u)
			}
		}
		if len(reads) == 0 {
			continue
		}
		used := func(r stretch) bool {
			return slices.ContainsFunc(reads, func(u int) bool { return g.p.SameBlock(u, r.units[0]) })
		}
		kept := open[:0]
		for _, r := range open {
			if used(r) {
				kept = append(kept, r)
			} else {
				done = append(done, r)
			}
		}
		open = kept
		for _, u := range reads {
			k := slices.IndexFunc(open, func(r stretch) bool { return g.p.SameBlock(u, r.units[0]) })
			if k < 0 {
				k = len(open)
				open = append(open, stretch{first: i})
			}
			if !slices.Contains(open[k].units, u) {
				open[k].units = append(open[k].units, u)
			}
			open[k].last = i
		}
	}
	done = append(done, open...)
	slices.SortFunc(done, func(a, b stretch) int {
		return cmp.Or(cmp.Compare(a.first, b.first), cmp.Compare(a.units[0], b.units[0]))
	})
	return done
}

func (g *gatherer) phase(w *graph.Editor, section string) {
	list, d := g.stretches(w), g.prefetch
	for k, r := range list {
		at := 0
		if k-d >= 0 {
			at = list[k-d].first
		}
		for _, u := range r.units {
			to := g.buffer(gatherKey{section, k, u})
			for i := r.first; i <= r.last; i++ {
				for a, id := range w.Base[i].Op.In {
					if v, ok := g.owner[id]; ok && v == u {
						w.Base[i].Op.In[a] = g.viewIn(to, id)
					}
				}
			}
			unit := &g.p.Units[u]
			pass, suffix := w.Base[r.first].Op.Pass, fmt.Sprintf(".%d", k)
			ops := []graph.Op{newOp(graph.AllGather, unit.Name+"/all_gather"+suffix, graph.Comm, pass, u,
				[]graph.BufID{unit.Compute.Buf}, []graph.Out{{Buf: to.whole}}, graph.GroupAttr{Axis: unit.Compute.Axis})}
			switch {
			case g.p.Buf(unit.Compute.Buf).DType != g.computed[u]:
				ops = gatherBase(g.p, u, pass, suffix, to.whole)
			case g.int8 && !unit.Frozen:
				ops = quantised{p: g.p, unit: u, pass: pass}.gather(suffix, unit.Compute.Buf, to.whole, unit.Compute.Axis)
			}
			for i, op := range ops {
				n := w.Before(at, op)
				if i == 0 && k-d-1 >= 0 {
					w.Throttle(w.Base[list[k-d-1].last], n)
				}
			}
		}
	}
}

func (g *gatherer) buffer(key gatherKey) *gathered {
	to, u := g.made[key], key.unit
	if to == nil {
		unit := &g.p.Units[u]
		to = &gathered{views: map[graph.BufID]graph.BufID{}}
		to.whole = g.p.AddBuffer(flatBuffer(fmt.Sprintf("unshard/%s/%s.%d", unit.Name, key.section, key.stretch), g.computed[u], graph.Unsharded, graph.LifePhase, u, unit.FlatLen, usedElems(unit)))
		g.made[key] = to
	}
	return to
}

func (g *gatherer) viewIn(to *gathered, param graph.BufID) graph.BufID {
	id, ok := to.views[param]
	if !ok {
		v := *g.p.Buf(param)
		v.Class, v.Life = graph.Unsharded, graph.LifePhase
		v.View = &graph.View{Base: to.whole, Offset: v.View.Offset}
		id = g.p.AddBuffer(v)
		to.views[param] = id
	}
	return id
}
