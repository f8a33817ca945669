package graph

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
