package graph

import "slices"

// SectionKind says what a section of the program does.
type SectionKind uint8

// Kinds of sections. A run starts with SectionInit and SectionRefresh; the others
// run in any order, any number of times.
const (
	SectionOther    SectionKind = iota // of a program that is no training run
	SectionForward                     // a micro-batch's forward and, once differentiated, backward
	SectionTrain                       // the same beside other sections, before it is made a step
	SectionInit                        // states get their first values, but for what the host writes
	SectionRefresh                     // 16-bit parameters are made anew from their masters
	SectionUpdate                      // what follows a step's gradients, in parts that no section has yet
	SectionStep                        // a step: micro-steps, then the update
	SectionFlush                       // updates that wait for the next step are done now
	SectionEval                        // a forward that nothing is learned from
	SectionGenerate                    // a forward of one row for its next token
	NumSectionKinds
)

var sectionKindNames = [NumSectionKinds]string{"other", "forward", "train", "init", "refresh", "update", "step", "flush", "eval", "generate"}

func (k SectionKind) String() string { return name(sectionKindNames[:], int(k), "section") }

// Form tells apart sections of one kind that do the same in different ways.
type Form uint8

// Forms.
const (
	FormWhole  Form = iota // everything is computed
	FormCached             // what the frozen beginning hands on comes from the host
	FormNext               // one token after those whose keys and values are kept
	NumForms
)

var formNames = [NumForms]string{"whole", "cached", "next"}

func (f Form) String() string { return name(formNames[:], int(f), "form") }

// SectionName is the name of a section of a kind in a form: "step", "step-cached".
func SectionName(kind SectionKind, form Form) string {
	if form == FormWhole {
		return kind.String()
	}
	return kind.String() + "-" + form.String()
}

// NewSection returns a section with its name.
func NewSection(kind SectionKind, form Form, phases ...Phase) Section {
	return Section{Name: SectionName(kind, form), Kind: kind, Form: form, Phases: phases}
}

// Become makes a section one of another kind, with its name.
func (s *Section) Become(kind SectionKind) { s.Kind, s.Name = kind, SectionName(kind, s.Form) }

// SectionOf returns the section of a kind in a form, or nil; of steps of several shapes
// (StepShape) the one with the most micro-batches.
func (p *Program) SectionOf(kind SectionKind, form Form) *Section {
	for i := range p.Sections {
		if p.Sections[i].Kind == kind && p.Sections[i].Form == form {
			return &p.Sections[i]
		}
	}
	return nil
}

// Micro returns the phase of a section that is a whole micro-batch by itself, or
// nil where the section has another shape: what passes before sharding rewrite.
func (s *Section) Micro() *Phase {
	if s == nil || len(s.Phases) != 1 {
		return nil
	}
	return &s.Phases[0]
}

// Update returns the section's update phase, or nil.
func (s *Section) Update() *Phase {
	if s == nil {
		return nil
	}
	for i := range s.Phases {
		if s.Phases[i].Kind == UpdatePhase {
			return &s.Phases[i]
		}
	}
	return nil
}

// LastMicro returns the phase of the last micro-step of a step, or nil.
func (s *Section) LastMicro() *Phase {
	if s == nil {
		return nil
	}
	for i := range s.Phases {
		if s.Phases[i].Kind == MicroPhase && s.Phases[i].Last {
			return &s.Phases[i]
		}
	}
	return nil
}

// PhaseKind says what a phase of a section is.
type PhaseKind uint8

// Kinds of phases.
const (
	OtherPhase  PhaseKind = iota
	MicroPhase            // one or, in layer order, all micro-steps: forward and backward
	UpdatePhase           // what follows the last micro-step

	// Parts of a SectionUpdate. Those of one unit have operations of that unit.
	UpdateStart // what sums of squares start from
	UpdateSum   // adds the squares of a unit's gradient, input 0 of the first operation
	UpdateNorm  // the norm over all ranks, the coefficient, the flag of a step to be skipped
	UpdateRule  // a unit's rule, and what makes its parameters whole again
	UpdateOut   // what the host is told
	NumPhaseKinds
)

var phaseKindNames = [NumPhaseKinds]string{"other", "micro", "update", "update-start", "update-sum", "update-norm", "update-rule", "update-out"}

func (k PhaseKind) String() string { return name(phaseKindNames[:], int(k), "phase") }

// HasKind says whether the program has an operation of a kind.
func (p *Program) HasKind(kind Kind) bool {
	for i := range p.Sections {
		for j := range p.Sections[i].Phases {
			if slices.ContainsFunc(p.Sections[i].Phases[j].Ops, func(op Op) bool { return op.Kind == kind }) {
				return true
			}
		}
	}
	return false
}
