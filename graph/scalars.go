package graph

import (
	"fmt"
	"slices"
)

// Scalars are the numbers that change with the step and that every update rule reads. They
// are in buffers, not constants of operations, so that a captured program can be run again.
// The program's first set is for the current step. There is a second set if updates are
// deferred into the next step, or run before the gradient norm is known.
type Scalars struct {
	Hyper BufID // F64 (NumHyper): rate, loss scale, bias corrections, number of the update: Hyper* constants
	Coef  BufID // F32 (1): factor for gradients: the clip coefficient over the loss scale
	Skip  BufID // I32 (1): while it is not 0 update rules change nothing; NoBuf: they always run
}

// scalarNames are the names of the fields in the text form.
var scalarNames = [...]string{"hyper", "coef", "skip"}

func (s *Scalars) buffers() []*BufID { return []*BufID{&s.Hyper, &s.Coef, &s.Skip} }

// check validates a set against the program's buffers.
func (s *Scalars) check(p *Program) error {
	want := [...]struct {
		dtype DType
		elems int64
	}{{F64, NumHyper}, {F32, 1}, {I32, 1}}
	for i, id := range s.buffers() {
		if *id == NoBuf && i == 2 {
			continue
		}
		if *id < 0 || int(*id) >= len(p.Buffers) {
			return fmt.Errorf("%s is buffer %d, want one of the program's %d", scalarNames[i], *id, len(p.Buffers))
		}
		if b := p.Buf(*id); b.DType != want[i].dtype || b.Elems() != want[i].elems {
			return fmt.Errorf("%s is %s, %v of %d elements, want %v of %d", scalarNames[i], p.bufName(*id), b.DType, b.Elems(), want[i].dtype, want[i].elems)
		}
	}
	return nil
}

// ScalarsOf returns the set that an update rule's operation reads. ok is false if the
// operation reads no set, or buffers of two sets.
func (p *Program) ScalarsOf(op *Op) (s Scalars, ok bool) {
	info, known := op.Info()
	if !known {
		return Scalars{}, false
	}
	read := Scalars{NoBuf, NoBuf, op.Skip}
	in, _ := info.Operands(op.Attr)
	for i, id := range op.In {
		switch in[i].Name {
		case "hyper":
			read.Hyper = id
		case "coef":
			read.Coef = id
		}
	}
	k := slices.IndexFunc(p.Scalars, func(s Scalars) bool {
		return (read.Hyper == NoBuf || read.Hyper == s.Hyper) && (read.Coef == NoBuf || read.Coef == s.Coef) && (read.Skip == s.Skip || op.Kind == ParamNorms && read.Skip == NoBuf)
	})
	if k < 0 {
		return Scalars{}, false
	}
	return p.Scalars[k], true
}
