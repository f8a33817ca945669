package graph

// SectionKind is the purpose of a section.
type SectionKind uint8

// Kinds of sections. A run starts with SectionInit and SectionRefresh; the others
// run in any order, any number of times.
const (
	SectionOther    SectionKind = iota // section of a program that does not train
	SectionForward                     // forward of a micro-batch and, once differentiated, its backward
	SectionTrain                       // SectionForward in a program that has other sections; becomes the step
	SectionInit                        // initialises states, except those that the host writes
	SectionRefresh                     // recomputes 16-bit parameters from their fp32 masters
	SectionUpdate                      // the update after a step's gradients, as phases that are not in a section yet
	SectionStep                        // a training step: micro-steps, then the update
	SectionFlush                       // runs the updates that were deferred to the next step
	SectionEval                        // a forward that computes only the loss
	SectionGenerate                    // a forward of one row that computes the logits of its next token
	NumSectionKinds
)

var sectionKindNames = [NumSectionKinds]string{"other", "forward", "train", "init", "refresh", "update", "step", "flush", "eval", "generate"}

func (k SectionKind) String() string { return name(sectionKindNames[:], int(k), "section") }

// Form distinguishes sections of one kind that compute the same in different ways.
type Form uint8

// Forms.
const (
	FormWhole  Form = iota // computes everything
	FormCached             // the output of the frozen first layers comes from the host
	FormNext               // computes one token, with keys and values of earlier tokens cached
	NumForms
)

var formNames = [NumForms]string{"whole", "cached", "next"}

func (f Form) String() string { return name(formNames[:], int(f), "form") }

// PhaseKind is the purpose of a phase in its section.
type PhaseKind uint8

// Kinds of phases.
const (
	OtherPhase  PhaseKind = iota
	MicroPhase            // one micro-step, or in layer order all of them: forward and backward
	UpdatePhase           // the operations after the last micro-step

	// Phases of a SectionUpdate. If a phase is for one unit, all its operations have that unit.
	UpdateStart // initial values of the sums of squares
	UpdateSum   // adds the squares of a unit's gradient; input 0 of the first operation is the gradient
	UpdateNorm  // the norm over all ranks, the clip coefficient, and the flag that skips a step
	UpdateRule  // a unit's update rule, and the gather of its parameters if all ranks keep them
	UpdateOut   // copies results for the host
	NumPhaseKinds
)

var phaseKindNames = [NumPhaseKinds]string{"other", "micro", "update", "update-start", "update-sum", "update-norm", "update-rule", "update-out"}

func (k PhaseKind) String() string { return name(phaseKindNames[:], int(k), "phase") }

// Section is a part of the program that runs as a unit: a step, an evaluation, a generation. Name
// follows from Kind and Form (SectionName). Sections share one arena. A section starts after the
// previous one has finished, and only LifeRun buffers carry contents from one to the next.
type Section struct {
	Name   string
	Kind   SectionKind
	Form   Form
	Shares []int // micro-batches of each rank in a run of the section; nil: every rank has the same number
	Phases []Phase
}

// Phase is a straight line of operations, run Repeat times in a row. First and Last say whether it
// includes the first and the last micro-step of its section; a phase with all micro-steps has both.
type Phase struct {
	Name        string
	Kind        PhaseKind
	First, Last bool
	Repeat      int
	Round       int // round of its first run, and of its first micro-batch: see shares.go
	Ops         []Op
	// Throttles are orders in addition to those that the data requires. They name operations until
	// Schedule turns them into events.
	Throttles []Throttle
}

// Throttle says that operation After must not start before operation Before of the same phase has
// finished. Before comes earlier in the phase. Throttles limit prefetching.
type Throttle struct{ Before, After string }

// SectionName returns the name of a section of a kind and form: "step", "step-cached".
func SectionName(kind SectionKind, form Form) string {
	if form == FormWhole {
		return kind.String()
	}
	return kind.String() + "-" + form.String()
}

// NewSection returns a section of the given kind and form, named by SectionName.
func NewSection(kind SectionKind, form Form, phases ...Phase) Section {
	return Section{Name: SectionName(kind, form), Kind: kind, Form: form, Phases: phases}
}

// Become changes the section's kind, and its name accordingly.
func (s *Section) Become(kind SectionKind) { s.Kind, s.Name = kind, SectionName(kind, s.Form) }

// Micro returns the only phase of a section, which is one complete micro-batch, or nil if the
// section has more phases. Passes before sharding rewrite this phase.
func (s *Section) Micro() *Phase {
	if s == nil || len(s.Phases) != 1 {
		return nil
	}
	return &s.Phases[0]
}

// Update returns the section's update phase, or nil.
func (s *Section) Update() *Phase {
	return s.find(func(ph *Phase) bool { return ph.Kind == UpdatePhase })
}

// LastMicro returns the phase of the last micro-step of a step, or nil.
func (s *Section) LastMicro() *Phase {
	return s.find(func(ph *Phase) bool { return ph.Kind == MicroPhase && ph.Last })
}

func (s *Section) find(is func(*Phase) bool) *Phase {
	if s == nil {
		return nil
	}
	for i := range s.Phases {
		if is(&s.Phases[i]) {
			return &s.Phases[i]
		}
	}
	return nil
}
