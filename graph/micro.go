package graph

import (
	"strconv"
	"strings"
)

// Micro is the number of a micro-batch within one run of a phase, for operations, buffers and
// ports. A phase that is repeated for each micro-step has one micro-batch, number 0. A phase in
// layer order runs all micro-batches of a step layer by layer, so it has as many as the step has
// micro-steps.

// MicroOf returns the micro-batch of a phase to which a buffer's contents belong. That holds
// for activations and scratch of LifePhase and for inputs that each micro-batch has. ok is
// false for buffers that micro-batches share: parameters, also gathered ones, and sums.
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

// microMark separates a name from the number of its micro-batch.
const microMark = "/micro."

// MicroName returns the name in the given micro-batch for a name in micro-batch 0.
func MicroName(name string, micro int) string {
	if micro == 0 {
		return name
	}
	return name + microMark + strconv.Itoa(micro)
}

// PlainName returns a buffer's name without the number of its micro-batch, so that name
// patterns match the buffers of all micro-batches.
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
