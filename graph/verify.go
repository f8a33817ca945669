package graph

import "fmt"

// Verify returns an error unless p is a program that can run as it is written. It
// is VerifyStructure and VerifyOrder.
func Verify(p *Program) error {
	v, err := structure(p)
	if err == nil {
		err = v.order()
	}
	if err != nil {
		return fmt.Errorf("graph: verify: %w", err)
	}
	return nil
}

// VerifyStructure checks what holds of a program after every pass:
//
//   - buffers have sizes, views lie inside their bases, aligned and of their
//     type; scales are as many as their values' blocks and lie in one buffer with
//     them; parameters, units and well-known buffers refer to what exists;
//   - every operation is right by the kind table (Check), its operands are in one
//     memory space (a copy's may be in two), and its name is unique in its phase;
//   - no operation mixes micro-batches; each run of a phase has the same ranks at work;
//   - collectives of one mesh axis are on one stream, so that every rank meets
//     them in one order.
//
// The error names section, phase and operation, and the buffer. The time grows
// with the number of operands.
func VerifyStructure(p *Program) error {
	if _, err := structure(p); err != nil {
		return fmt.Errorf("graph: verify: %w", err)
	}
	return nil
}

// VerifyOrder checks what holds once operations have their events, and in a
// program on one stream before that. The program's structure must be sound:
//
//   - each wait has a record before it in the section;
//   - of two operations that touch the same bytes, one of them writing, one
//     happens before the other (see Trace), also from one repetition of a phase
//     to the next;
//   - every byte read has been written earlier in the section, and in the same
//     run of the phase for a LifePhase buffer, flat-parameter padding excepted.
//     LifeRun buffers need a writer anywhere: an operation of some section, or the
//     host. Inputs that no operation writes are the host's.
//
// The error names section, phase and operation, the buffer, and the other
// operation where there is one. A buffer that is used in many different ranges
// costs that number for each use.
func VerifyOrder(p *Program) error {
	regions, err := NewRegions(p)
	if err == nil {
		v := verifier{p: p, regions: regions}
		err = v.order()
	}
	if err != nil {
		return fmt.Errorf("graph: verify: %w", err)
	}
	return nil
}

func structure(p *Program) (*verifier, error) {
	v := &verifier{p: p}
	if err := v.tables(); err != nil {
		return nil, err
	}
	var err error
	if v.regions, err = NewRegions(p); err != nil {
		return nil, err
	}
	for _, check := range []func() error{v.buffers, v.scales, v.operations, v.micros, v.shares, v.collectives} {
		if err := check(); err != nil {
			return nil, err
		}
	}
	return v, nil
}

func (v *verifier) order() error {
	v.writers()
	return v.sections()
}
