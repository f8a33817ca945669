package search

import (
	"context"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/recompute"
)

// chooseRecompute chooses the buffers to recompute on a machine. The choice depends only on the
// configuration and the machine's rates. The forecast is that of the choice if its plan is
// complete, otherwise nil.
func chooseRecompute(ctx context.Context, spec Spec, m *cost.Machine) (*Chosen, *Forecast, error) {
	spec.Recompute, spec.Auto = recompute.Options{}, false
	s := newSearcher(ctx, spec, m, true, nil)
	if spec.measurer != nil {
		s.share(spec.measurer)
	}
	b := spec.asBase()
	set, err := s.moves(b)
	if err != nil {
		return nil, nil, err
	}
	from := s.measure(s.plain(b, set))
	if from.err != nil {
		return nil, nil, from.err
	}
	limit := spec.Capacity[graph.Device]
	if limit == 0 {
		return &Chosen{Outcome: NoCap}, nil, nil
	}
	f, at, some := s.fewestDrops(b, set, from)
	if !some {
		if f, at = s.allButOne(b, set); f == nil {
			return &Chosen{Recompute: policyOf(recompute.Full), Outcome: NotEnough}, nil, ctx.Err()
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	if f == nil {
		return &Chosen{Recompute: policyOf(recompute.Full), Outcome: Everything}, nil, nil
	}
	c := &Chosen{Recompute: f.Spec.Recompute, Outcome: Some}
	f.Chosen = c
	if !c.Recompute.Active() {
		c.Outcome, c.Need, c.Capacity = Nothing, f.Plan.Layout.Spaces[graph.Device].Peak+spec.Outside[graph.Device], limit
		return c, f, nil
	}
	saved := 0.0
	for i := range set.moves {
		mv := &set.moves[i]
		n := mv.layers(s.layers)
		c.AllBuffers += n
		if at.x[i] > 0 {
			k := layersOf(at.x[i], n)
			c.Buffers += k
			saved += mv.bytes * float64(k) / float64(n)
		}
	}
	c.Bytes, c.Slower = int64(saved), f.Step.Seconds/from.seconds
	return c, f, nil
}

// allButOne returns the fastest plan that fits of those which recompute all kinds of buffers but
// one. Recomputing a buffer may need more memory at the peak than keeping it. nil: none fits.
func (s *searcher) allButOne(b base, set *moveSet) (best *Forecast, at *point) {
	for kept := range set.moves {
		p := s.plain(b, set)
		for i := range p.x {
			p.x[i] = 1
		}
		p.x[kept] = 0
		if m := s.measure(p); m.err != nil || s.overCaps(m) {
			continue
		}
		f, err := predict(s.ctx, s.whole(p), s.machine, 0, early)
		if err == nil && f.Fits() && (best == nil || f.Step.Seconds < best.Step.Seconds) {
			best, at = f, p
		}
	}
	return best, at
}
