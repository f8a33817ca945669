package graph

import "slices"

// Uneven shares. The share of a rank is its number of micro-batches in a step. Micro-batches are
// dealt in rounds: in round k each rank whose share exceeds k takes the next micro-batch (a leaf),
// in rank order. With shares 1, 3, 2:
//
//	           rank 0  rank 1  rank 2
//	round 0    leaf 0  leaf 1  leaf 2
//	round 1    –       leaf 3  leaf 4
//	round 2    –       leaf 5  –
//
// All ranks run the same program. A rank without a micro-batch in a round is idle. It skips the
// micro-batch's operations, which then only wait and record as a Join does. It takes part in all
// others: gathers, reductions, updates, copies of states. A reduction leaves out the operand of an
// idle rank (Present).
//
// Shares belong to the ranks along the mesh's only axis. Each section has its own, since the
// steps of one run may have different numbers of micro-batches (StepShape).

// StepShape is the number of micro-batches of a step, in total and for each rank.
type StepShape struct {
	Rounds int   // the most micro-batches of any rank
	Shares []int // by rank: its micro-batches, at most Rounds; nil: Rounds on every rank
}

// StepOf returns the section for a step of the given shape and form, or nil. repeats is the number
// of runs of its repeating phase, 0 if no phase repeats: steps that differ only in this number
// share one section.
func (p *Program) StepOf(form Form, shape StepShape) (sec *Section, repeats int) {
	for i := range p.Sections {
		s := &p.Sections[i]
		if s.Kind != SectionStep || s.Form != form {
			continue
		}
		if n, ok := s.repeats(shape); ok {
			return s, n
		}
	}
	return nil, 0
}

// Alone returns a program with only one of p's sections, for counting or timing its operations. Its
// repeating phase runs repeats times; 0: as planned.
func (p *Program) Alone(sec *Section, repeats int) *Program {
	q, s := *p, *sec
	s.Phases = slices.Clone(sec.Phases)
	for i := range s.Phases {
		if ph := &s.Phases[i]; ph.Repeat > 1 && repeats > 0 {
			ph.Repeat = repeats
		}
	}
	q.Sections = []Section{s}
	return &q
}

// repeats returns how often the repeating phase runs in a step of the given shape. ok is false if
// the section cannot run it. The events of a phase are valid for one run, or for two and more
// (copies).
func (s *Section) repeats(shape StepShape) (n int, ok bool) {
	rounds, planned := 0, 0
	var last *Phase
	for i := range s.Phases {
		ph := &s.Phases[i]
		if ph.Kind != MicroPhase {
			continue
		}
		if last = ph; ph.Repeat > 1 {
			if planned > 0 {
				return 0, false
			}
			planned = ph.Repeat
		} else {
			rounds += ph.MicroBatches()
		}
	}
	n = shape.Rounds - rounds
	if last == nil || planned == 0 && n != 0 || planned > 0 && (n < 2 || n > planned) {
		return 0, false
	}
	for i, round := range []int{0, shape.Rounds - 2, shape.Rounds - 1} {
		own := []int{0, rounds + planned - 2, rounds + planned - 1}[i]
		if round >= 0 && !slices.Equal(PresentIn(shape.Shares, round), PresentIn(s.Shares, own)) {
			return 0, false
		}
	}
	return n, true
}

// EvenShares deals micro-batches (leaves) to ranks, one round after another. It returns nil if
// all ranks get the same number.
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

// Present lists the ranks that have a micro-batch when an operation of the phase runs, in
// order; nil: all ranks, as in an update.
func (s *Section) Present(ph *Phase, op *Op) []int {
	if ph.Kind != MicroPhase || s.Shares == nil || op.Pass == Update {
		return nil
	}
	return PresentIn(s.Shares, ph.Round+op.Micro)
}

// PresentIn lists the ranks that have a micro-batch in a round, in order; nil: all ranks.
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

// Idle says whether a rank skips an operation of a phase because it has no micro-batch in that
// round.
func (p *Program) Idle(s *Section, ph *Phase, op *Op, rank int) bool {
	present := s.Present(ph, op)
	return present != nil && !slices.Contains(present, rank) && p.ofMicroBatch(op)
}

// ofMicroBatch says whether an operation belongs to the micro-batch alone: it touches the
// micro-batch's own buffers or gradient, and no other rank takes part in it. A copy of inputs
// does not belong to it, because it includes the step's scalars.
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
