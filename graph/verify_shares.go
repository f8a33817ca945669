package graph

import (
	"fmt"
	"slices"
)

// shares checks the sections' shares, and that a phase has the same ranks in all repetitions.
func (v *verifier) shares() error {
	for i := range v.p.Sections {
		s := &v.p.Sections[i]
		if s.Shares == nil {
			continue
		}
		if err := v.sharesOf(s); err != nil {
			return fmt.Errorf("%s: %w", s.Name, err)
		}
	}
	return nil
}

func (v *verifier) sharesOf(s *Section) error {
	if len(s.Shares) != v.p.WorldSize() {
		return fmt.Errorf("%d shares for %d ranks, want one for each", len(s.Shares), v.p.WorldSize())
	}
	if slices.Min(s.Shares) < 1 {
		return fmt.Errorf("shares %v: each rank has at least 1 micro-batch", s.Shares)
	}
	rounds := slices.Max(s.Shares)
	for j := range s.Phases {
		ph := &s.Phases[j]
		end := ph.Round + max(ph.Repeat, ph.MicroBatches())
		if ph.Round < 0 || end > rounds {
			return fmt.Errorf("%s: rounds %d to %d, want a part of the section's %d", ph.Name, ph.Round, end-1, rounds)
		}
		for r := ph.Round + 1; r < ph.Round+ph.Repeat; r++ {
			if !slices.Equal(PresentIn(s.Shares, r), PresentIn(s.Shares, ph.Round)) {
				return fmt.Errorf("%s: rounds %d and %d have different ranks, want the same in a phase that repeats", ph.Name, ph.Round, r)
			}
		}
		if err := v.idle(s, ph); err != nil {
			return fmt.Errorf("%s/%w", ph.Name, err)
		}
	}
	return nil
}

// idle checks that an idle rank reads no buffer whose writer it skipped, except in reductions,
// which leave out its operand too.
func (v *verifier) idle(s *Section, ph *Phase) error {
	p := v.p
	left := map[BufID]string{} // by root: the operation that would have written it
	for k := range ph.Ops {
		op := &ph.Ops[k]
		if s.Present(ph, op) != nil && p.ofMicroBatch(op) {
			for _, o := range op.Out {
				if o.Buf != NoBuf && o.Mode == Write {
					left[v.regions.Of[o.Buf].Root] = op.Name
				}
			}
			continue
		}
		var err error
		Effects(op, func(e Effect) {
			root := v.regions.Of[e.Buf].Root
			switch by, is := left[root]; {
			case !is:
			case e.Read && !e.Write && (op.Kind == ReduceScatter || op.Kind == AllToAll):
			case e.Read:
				err = fmt.Errorf("%s: reads %s, which a rank without a micro-batch has not: it leaves out %s", op.Name, p.bufName(e.Buf), by)
			case e.Buf == root:
				delete(left, root)
			}
		})
		if err != nil {
			return err
		}
	}
	return nil
}
