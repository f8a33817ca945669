package graph

import (
	"fmt"
	"slices"
)

// Uneven shares. A step's micro-batches are dealt in rounds: in round k each rank whose
// share exceeds k takes the next one, in the order of the ranks. With shares 1, 3, 2:
//
//	           rank 0  rank 1  rank 2
//	round 0    leaf 0  leaf 1  leaf 2
//	round 1    –       leaf 3  leaf 4
//	round 2    –       leaf 5  –
//
// All ranks run the same program. A rank without a micro-batch in a round is idle: it
// leaves out the operations of the micro-batch, which then only wait and record as a Join
// does, and takes part in the others: gathers, reductions, updates, copies of states. A
// reduction leaves out the operand of an idle rank (Present).
//
// Shares are those of the ranks along the mesh's only axis.

// EvenShares deals so many micro-batches to ranks, a round after the other; nil: every
// rank has as many.
func EvenShares(leaves, ranks int) []int {
	if leaves%ranks == 0 {
		return nil
	}
	shares := make([]int, ranks)
	for r := range shares {
		shares[r] = leaves / ranks
		if r < leaves%ranks {
			shares[r]++
		}
	}
	return shares
}

// Present lists the ranks that have a micro-batch where an operation of a phase runs, in
// order; nil: all.
func (p *Program) Present(ph *Phase, op *Op) []int {
	if ph.Kind != MicroPhase || p.Shares == nil {
		return nil
	}
	return PresentIn(p.Shares, ph.Round+op.Micro)
}

// PresentIn lists the ranks with a micro-batch in a round, in order; nil: all.
func PresentIn(shares []int, round int) []int {
	var list []int
	for rank, n := range shares {
		if n > round {
			list = append(list, rank)
		}
	}
	if len(list) == len(shares) {
		return nil
	}
	return list
}

// Idle says whether a rank leaves out an operation of a phase because it has no micro-batch
// there.
func (p *Program) Idle(ph *Phase, op *Op, rank int) bool {
	present := p.Present(ph, op)
	return present != nil && !slices.Contains(present, rank) && p.ofMicroBatch(op)
}

// ofMicroBatch says whether an operation is for the micro-batch alone: it touches what the
// micro-batch has of its own, or its gradient, and no other rank takes part in it. Copies
// of inputs run: the step's scalars are among them.
func (p *Program) ofMicroBatch(op *Op) bool {
	if _, together := op.Attr.(GroupAttr); together || op.Pass == Update {
		return false
	}
	if op.Kind == Copy && p.Buf(op.In[0]).Class == Inputs {
		return false
	}
	if slices.ContainsFunc(op.In, p.ofOneMicroBatch) {
		return true
	}
	return slices.ContainsFunc(op.Out, func(o Out) bool { return p.ofOneMicroBatch(o.Buf) })
}

func (p *Program) ofOneMicroBatch(id BufID) bool {
	if id == NoBuf {
		return false
	}
	root, _ := p.Resolve(id, nil)
	if _, own := p.microOfRoot(root); own {
		return true
	}
	u := p.Buf(root).Unit
	return u >= 0 && u < len(p.Units) && p.Units[u].Grad != nil && p.Units[u].Grad.Whole == root
}

// shares checks the shares, and that each repetition of a phase has the same ranks.
func (v *verifier) shares() error {
	p := v.p
	if p.Shares == nil {
		return nil
	}
	if len(p.Shares) != p.WorldSize() {
		return fmt.Errorf("%d shares for %d ranks", len(p.Shares), p.WorldSize())
	}
	if slices.Min(p.Shares) < 1 {
		return fmt.Errorf("shares %v: each rank has at least 1 micro-batch", p.Shares)
	}
	rounds := slices.Max(p.Shares)
	for i := range p.Sections {
		s := &p.Sections[i]
		for j := range s.Phases {
			ph := &s.Phases[j]
			end := ph.Round + max(ph.Repeat, ph.MicroBatches())
			if ph.Round < 0 || end > rounds {
				return fmt.Errorf("%s/%s: rounds %d to %d of %d", s.Name, ph.Name, ph.Round, end-1, rounds)
			}
			for r := ph.Round + 1; r < ph.Round+ph.Repeat; r++ {
				if !slices.Equal(PresentIn(p.Shares, r), PresentIn(p.Shares, ph.Round)) {
					return fmt.Errorf("%s/%s: rounds %d and %d have different ranks", s.Name, ph.Name, ph.Round, r)
				}
			}
			if err := v.idle(ph); err != nil {
				return fmt.Errorf("%s/%s/%w", s.Name, ph.Name, err)
			}
		}
	}
	return nil
}

// idle checks that an idle rank reads nothing that it left out, but for the operands that
// reductions leave out too.
func (v *verifier) idle(ph *Phase) error {
	p := v.p
	left := map[BufID]string{} // by root: the operation that would have written it
	for k := range ph.Ops {
		op := &ph.Ops[k]
		if p.Present(ph, op) != nil && p.ofMicroBatch(op) {
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
