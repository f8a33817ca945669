package graph

// SectionKind says what a section of the program does.
type SectionKind uint8

// Kinds of sections. A run starts with SectionInit and SectionRefresh; the others
// run in any order, any number of times.
const (
	SectionOther    SectionKind = iota // in a program that does not train
	SectionForward                     // forward of a micro-batch and, once differentiated, its backward
	SectionTrain                       // SectionForward in a program that has other sections; becomes the step
	SectionInit                        // initialises states, except those that the host writes
	SectionRefresh                     // recomputes 16-bit parameters from their fp32 masters
	SectionUpdate                      // the update after a step's gradients, as phases that are not placed in a section yet
	SectionStep                        // a training step: micro-steps, then the update
	SectionFlush                       // runs now the updates that were deferred to the next step
	SectionEval                        // a forward that computes only the loss
	SectionGenerate                    // a forward of one row, for the logits of its next token
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

// PhaseKind says what a phase of a section does.
type PhaseKind uint8

// Kinds of phases.
const (
	OtherPhase  PhaseKind = iota
	MicroPhase            // one micro-step, or in layer order all of them: forward and backward
	UpdatePhase           // the operations after the last micro-step

	// Phases of a SectionUpdate. All operations of a phase for one unit have that unit.
	UpdateStart // initial values of the sums of squares
	UpdateSum   // adds the squares of a unit's gradient, which is input 0 of the first operation
	UpdateNorm  // the norm over all ranks, the clip coefficient, and the flag that skips a step
	UpdateRule  // a unit's update rule, and the gather of its parameters if all ranks keep them
	UpdateOut   // copies results for the host
	NumPhaseKinds
)

var phaseKindNames = [NumPhaseKinds]string{"other", "micro", "update", "update-start", "update-sum", "update-norm", "update-rule", "update-out"}

func (k PhaseKind) String() string { return name(phaseKindNames[:], int(k), "phase") }

// Section is something that the program can be asked to run as a whole: a step,
// an evaluation, a generation. Kind and Form say what it is, Name is what a person
// calls it (SectionName). Sections share one arena; only LifeRun buffers carry
// contents from one to the next, and one starts after the other has finished.
type Section struct {
	Name   string
	Kind   SectionKind
	Form   Form
	Shares []int // micro-batches of each rank in a run of it; nil: every rank has as many
	Phases []Phase
}

// Phase is a straight line of operations, run Repeat times in a row. Of a step's
// micro-steps First and Last say which it has: a phase of all has both.
type Phase struct {
	Name        string
	Kind        PhaseKind
	First, Last bool
	Repeat      int
	Round       int // of its first run, and of its first micro-batch: see shares.go
	Ops         []Op
	// Throttles are orders beyond what the data demands. They wait here, by
	// name, for Schedule, which makes them events.
	Throttles []Throttle
}

// Throttle says that operation After must not start before operation Before of
// the same phase has finished. Before stands earlier in the phase. Prefetching
// is bounded so.
type Throttle struct{ Before, After string }

// SectionName returns the name of a section of a kind and form: "step", "step-cached".
func SectionName(kind SectionKind, form Form) string {
	if form == FormWhole {
		return kind.String()
	}
	return kind.String() + "-" + form.String()
}

// NewSection returns a section of the given kind and form, with the name that follows.
func NewSection(kind SectionKind, form Form, phases ...Phase) Section {
	return Section{Name: SectionName(kind, form), Kind: kind, Form: form, Phases: phases}
}

// Become changes the section's kind, and its name accordingly.
func (s *Section) Become(kind SectionKind) { s.Kind, s.Name = kind, SectionName(kind, s.Form) }

// Micro returns the only phase of a section, which is one whole micro-batch, or nil if the
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
