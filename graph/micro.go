package graph

import (
	"fmt"
	"strconv"
	"strings"
)

// The micro-batch of operations, buffers and ports (Micro) counts those that one run
// of a phase goes through. A phase that runs micro-step by micro-step, its Repeat
// times one after the other, has one micro-batch, number 0; one that goes through all
// of a step's micro-batches layer by layer has as many as the step has micro-steps.

// MicroOf returns which of a phase's micro-batches a buffer holds something of:
// activations and scratch that live for the phase, and the inputs that each has its own
// of. ok is false for what the micro-batches share: parameters, also while they are
// gathered, and sums.
func (p *Program) MicroOf(id BufID) (micro int, ok bool) {
	root, _ := p.Resolve(id, nil)
	return p.microOfRoot(root)
}

func (p *Program) microOfRoot(root BufID) (micro int, ok bool) {
	b := p.Buf(root)
	switch {
	case b.Life == LifePhase && (b.Class == Activations || b.Class == Workspace), b.Port.EachMicro():
		return b.Micro, true
	case b.Class == Inputs && b.Port == NoPort: // tokens, targets, keys, a classifier's features
		return b.Micro, root != p.Hyper
	}
	return 0, false
}

// microMark stands between a name and its micro-batch's number.
const microMark = "/micro."

// MicroName is the name of what belongs to a micro-batch of a phase, by the name of
// the same thing of the first one.
func MicroName(name string, micro int) string {
	if micro == 0 {
		return name
	}
	return name + microMark + strconv.Itoa(micro)
}

// PlainName is a buffer's name without its micro-batch's number: patterns of names
// mean those of all micro-batches.
func (b *Buffer) PlainName() string {
	if b.Micro == 0 {
		return b.Name
	}
	return strings.TrimSuffix(b.Name, microMark+strconv.Itoa(b.Micro))
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
		if micro, ok := p.microOfRoot(v.regions.Of[id].Root); ok {
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
