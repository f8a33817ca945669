package graph

import "fmt"

// The micro-batch of operations, buffers and ports (Micro) counts those that one run
// of a phase goes through. A phase that runs micro-step by micro-step, its Repeat
// times one after the other, has one micro-batch, number 0; one that goes through all
// of a step's micro-batches layer by layer has as many as the step has micro-steps.

// MicroOf returns which of a phase's micro-batches a buffer holds something of. ok is
// false for what the micro-batches share: what lasts beyond a phase, as parameters and
// sums do, but for the inputs that each has its own of.
func (p *Program) MicroOf(id BufID) (micro int, ok bool) {
	root, _ := p.Resolve(id, nil)
	b := p.Buf(root)
	if b.Life != LifePhase {
		for _, in := range []BufID{p.Tokens, p.Targets, p.Key} {
			if root == in {
				return b.Micro, true
			}
		}
		if !b.Port.EachMicro() {
			return 0, false
		}
	}
	return b.Micro, true
}

// MicroBatches returns how many micro-batches one run of a phase goes through.
func (ph *Phase) MicroBatches() int {
	n := 0
	for i := range ph.Ops {
		n = max(n, ph.Ops[i].Micro)
	}
	return n + 1
}

// micros checks that no operation mixes micro-batches: it touches what is its own, or
// shared.
func (v *verifier) micros() error {
	p := v.p
	of := make([]int, len(p.Buffers)) // −1: shared
	several := false
	for id := range p.Buffers {
		if micro, ok := p.MicroOf(BufID(id)); ok {
			of[id] = micro
			several = several || micro > 0
		} else {
			of[id] = -1
		}
	}
	return v.each(func(op *Op) error {
		if op.Micro < 0 {
			return fmt.Errorf("belongs to micro-batch %d, want 0 or more", op.Micro)
		}
		if !several && op.Micro == 0 {
			return nil
		}
		var err error
		Effects(op, func(e Effect) {
			if at := of[e.Buf]; err == nil && at >= 0 && at != op.Micro {
				err = fmt.Errorf("is of micro-batch %d and touches %s of micro-batch %d", op.Micro, p.bufName(e.Buf), at)
			}
		})
		return err
	})
}
