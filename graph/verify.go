package graph

import "fmt"

// Verify returns an error unless p can run as it is written. It does the checks of VerifyStructure
// and VerifyOrder.
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

// VerifyStructure checks the rules that a program obeys after every pass:
//
//   - Buffers have sizes. Views stay inside their bases, are aligned and have the base's type.
//     There is one scale for each block of values, in the same buffer as the values. Parameters,
//     units and well-known buffers refer to existing buffers.
//   - Every operation obeys the kind table (Check). Its operands are in one memory space (a copy's
//     may be in two), and its name is unique in its phase.
//   - No operation mixes micro-batches. The same ranks work in each run of a phase.
//   - Collectives of one mesh axis are on one stream, so that every rank runs them in the same
//     order.
//
// The error names section, phase and operation, and the buffer. The time grows
// with the number of operands.
func VerifyStructure(p *Program) error {
	if _, err := structure(p); err != nil {
		return fmt.Errorf("graph: verify: %w", err)
	}
	return nil
}

// VerifyOrder checks the rules for a program whose operations have their events, or that is on one
// stream and has none yet. The program's structure must be sound:
//
//   - Each wait has an earlier record in the section.
//   - If two operations touch the same bytes and one of them writes, one happens before the other
//     (see Trace), also from one repetition of a phase to the next.
//   - Every byte read has been written earlier in the section, except flat-parameter padding. For a
//     LifePhase buffer the write is in the same run of the phase. A LifeRun buffer may be written
//     anywhere, by an operation of any section or by the host. The host writes inputs that no
//     operation writes.
//
// The error names section, phase and operation, the buffer, and the other operation if there is
// one. Each use of a buffer takes time proportional to the number of different ranges in which the
// buffer is used.
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
