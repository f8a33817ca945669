package fsdp

import (
	"fmt"
	"sort"

	"github.com/spillway-ml/spillway/graph"
)

// region is a stretch of a phase that uses a unit's parameters, as base
// indices, between uses of other units.
type region struct{ unit, first, last int }

type gatherKey struct {
	section string
	region  int
}

type gathered struct {
	whole graph.BufID
	views map[graph.BufID]graph.BufID // parameter's value → its place in whole
}

// regions finds the use regions of a phase in order of their first use.
func (s *sharder) regions(w *weave, owner map[graph.BufID]int) []region {
	var done []region
	open := map[int]*region{}
	var reads []int
	for i, n := range w.base {
		reads = reads[:0]
		for _, id := range n.op.In {
			if u, ok := owner[id]; ok {
				reads = append(reads, u)
			}
		}
		if len(reads) == 0 {
			continue
		}
		for u, r := range open {
			if !contains(reads, u) {
				done = append(done, *r)
				delete(open, u)
			}
		}
		for _, u := range reads {
			if open[u] == nil {
				open[u] = &region{u, i, i}
			}
			open[u].last = i
		}
	}
	for _, r := range open {
		done = append(done, *r)
	}
	sort.Slice(done, func(i, j int) bool {
		if done[i].first != done[j].first {
			return done[i].first < done[j].first
		}
		return done[i].unit < done[j].unit
	})
	return done
}

func contains(list []int, v int) bool {
	for _, x := range list {
		if x == v {
			return true
		}
	}
	return false
}

// unshard gathers each unit before every region that uses it, into a buffer
// that lives for the region only. The gather of region k is issued when region
// k−d starts computing, and not before region k−d−1 has finished (d is the
// prefetch distance), so that at most d+1 units are whole at a time:
//
//	comm:     AG 0  AG 1 │      AG 2 │      AG 3 │
//	compute:             region 0    region 1    region 2       (d = 1)
func (s *sharder) unshard(w *weave, section string) {
	if !s.o.Stage.ShardsParams() {
		return
	}
	p := s.p
	owner := map[graph.BufID]int{}
	for i := range p.Params {
		owner[p.Params[i].Value] = p.Params[i].Unit
	}
	regions := s.regions(w, owner)
	d := s.o.Prefetch
	for k, r := range regions {
		g := s.gatheredBuffer(gatherKey{section, k}, r.unit)
		for i := r.first; i <= r.last; i++ {
			for a, id := range w.base[i].op.In {
				if u, ok := owner[id]; ok && u == r.unit {
					w.base[i].op.In[a] = s.viewIn(g, id)
				}
			}
		}
		at := 0
		if k-d >= 0 {
			at = regions[k-d].first
		}
		ag := w.insertBefore(at, newOp(graph.AllGather, fmt.Sprintf("%s/all_gather.%d", p.Units[r.unit].Name, k), graph.Comm, w.base[r.first].op.Pass, r.unit,
			[]graph.BufID{s.units[r.unit].valueShard}, []graph.Out{{Buf: g.whole}}, s.group()))
		if k-d-1 >= 0 {
			w.order(w.base[regions[k-d-1].last], ag)
		}
	}
}

func (s *sharder) gatheredBuffer(key gatherKey, u int) *gathered {
	g := s.gathered[key]
	if g == nil {
		unit := &s.p.Units[u]
		g = &gathered{views: map[graph.BufID]graph.BufID{}}
		g.whole = s.p.AddBuffer(flatBuffer(fmt.Sprintf("unshard/%s/%s.%d", unit.Name, key.section, key.region), s.p.Buf(s.units[u].valueShard).DType, graph.Unsharded, graph.LifePhase, u, unit.FlatLen, usedElems(unit)))
		s.gathered[key] = g
	}
	return g
}

func (s *sharder) viewIn(g *gathered, param graph.BufID) graph.BufID {
	id, ok := g.views[param]
	if !ok {
		v := *s.p.Buf(param)
		v.Class, v.Life = graph.Unsharded, graph.LifePhase
		v.View = &graph.View{Base: g.whole, Offset: v.View.Offset}
		id = s.p.AddBuffer(v)
		g.views[param] = id
	}
	return id
}
