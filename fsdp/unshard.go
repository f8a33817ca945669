package fsdp

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// region is a stretch of a phase that uses a block's parameters, as base
// indices, between uses of other blocks. Its units are gathered together, in the
// order of their first use.
type region struct {
	units       []int
	first, last int
}

type gatherKey struct {
	section string
	region  int
	unit    int
}

type gathered struct {
	whole graph.BufID
	views map[graph.BufID]graph.BufID // parameter's value → its place in whole
}

// regions finds the use regions of a phase in order of their first use.
func (s *sharder) regions(w *graph.Editor, owner map[graph.BufID]int) []region {
	var done, open []region
	var reads []int
	for i, n := range w.Base {
		reads = reads[:0]
		for _, id := range n.Op.In {
			if u, ok := owner[id]; ok && !slices.Contains(reads, u) {
				reads = append(reads, u)
			}
		}
		if len(reads) == 0 {
			continue
		}
		used := func(r region) bool {
			return slices.ContainsFunc(reads, func(u int) bool { return s.p.SameBlock(u, r.units[0]) })
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
			k := slices.IndexFunc(open, func(r region) bool { return s.p.SameBlock(u, r.units[0]) })
			if k < 0 {
				k = len(open)
				open = append(open, region{first: i})
			}
			if !slices.Contains(open[k].units, u) {
				open[k].units = append(open[k].units, u)
			}
			open[k].last = i
		}
	}
	done = append(done, open...)
	slices.SortFunc(done, func(a, b region) int {
		return cmp.Or(cmp.Compare(a.first, b.first), cmp.Compare(a.units[0], b.units[0]))
	})
	return done
}

// unshard gathers the units of a block before every region that uses them, into
// buffers that live for the region only. The gather of region k is issued when region
// k−d starts computing, and not before region k−d−1 has finished (d is the
// prefetch distance), so that at most d+1 blocks are whole at a time:
//
//	comm:     AG 0  AG 1 │      AG 2 │      AG 3 │
//	compute:             region 0    region 1    region 2       (d = 1)
func (s *sharder) unshard(w *graph.Editor, section string) {
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
		at := 0
		if k-d >= 0 {
			at = regions[k-d].first
		}
		for _, u := range r.units {
			g := s.gatheredBuffer(gatherKey{section, k, u})
			for i := r.first; i <= r.last; i++ {
				for a, id := range w.Base[i].Op.In {
					if v, ok := owner[id]; ok && v == u {
						w.Base[i].Op.In[a] = s.viewIn(g, id)
					}
				}
			}
			ag := w.Before(at, newOp(graph.AllGather, fmt.Sprintf("%s/all_gather.%d", p.Units[u].Name, k), graph.Comm, w.Base[r.first].Op.Pass, u,
				[]graph.BufID{s.units[u].valueShard}, []graph.Out{{Buf: g.whole}}, s.group()))
			if k-d-1 >= 0 {
				w.Throttle(w.Base[regions[k-d-1].last], ag)
			}
		}
	}
}

func (s *sharder) gatheredBuffer(key gatherKey) *gathered {
	g, u := s.gathered[key], key.unit
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
