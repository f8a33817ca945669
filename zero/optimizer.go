package zero

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/graph"
)

// ExactLimbs is the length of an exact accumulator in int64 (package
// kernels/cpu/exact, whose test holds it to this number).
const ExactLimbs = 72

// Optimizer is an update rule with its constants. What changes by step (rate,
// bias corrections, clip coefficient) reaches it through the Hyper buffer.
type Optimizer struct {
	Name         string // one of OptimizerNames
	Rule         *Rule  // in place of the one that Name names; nil: that one
	Beta1, Beta2 float64
	Eps          float64
	Decay        float64 // on parameters whose Decay is set
	Trust        float64 // trust coefficient η, of rules that read it
	Nesterov     bool    // of momentum
	// AdaptAll has rules that adapt a rate to norms do so for every parameter, as
	// the papers are written. Otherwise parameters without Decay
	// (biases, norms) keep the unadapted rate, as the recipes of these optimizers
	// do: a bias that starts at zero has no norm to adapt to.
	AdaptAll bool
	// LossScale is how the scale of a program that has one moves; its zero value
	// stands for graph.DefaultLossScale.
	LossScale graph.LossScaleAttr
	// Int8 keeps the states of a rule with Rule.Narrow in 8 bits (graph.State).
	Int8 bool
	// BF16 keeps states and parameters in bf16, rounded stochastically, and no fp32
	// master of them.
	BF16 bool
}

// Constant names a constant of Optimizer that counts for some rules only.
type Constant string

// Constants.
const (
	Beta1    Constant = "beta1"    // the decay of a first moment, or momentum
	Beta2    Constant = "beta2"    // the decay of a second moment
	Eps      Constant = "eps"      // what is added to a divisor
	Trust    Constant = "trust"    // a factor of the rate: 0 would train nothing
	AdaptAll Constant = "adaptAll" // whose rates are scaled by norms
	Nesterov Constant = "nesterov" // a form of momentum
)

// Rule is an update rule as a value. A new one is a file that registers a value of
// this type (or a value in the spec, as Optimizer.Rule), and its kernels.
type Rule struct {
	Name     string
	States   []string // flat states beside the parameters
	PerParam []string // states with one element a parameter
	Source   string   // of the method
	// Narrow says that its kernels also take states in 8 bits, and bf16 without masters:
	// Optimizer.Int8 and BF16.
	Narrow bool
	// CPUOnly says that the libraries have its kernels for the CPU alone.
	CPUOnly bool
	// Reads are the constants that count for it.
	Reads []Constant
	// Takes says which trained parameters it updates, where Rest updates the others: a unit
	// has either alone (Optimizer.Apart). nil: all.
	Takes func(p *graph.Program, param int) bool
	Rest  *Rule
	// Emit writes a unit's operations.
	Emit func(e *Emitter, t *Target)

	operations []*graph.Operation // of a registered rule
}

// rules are those that have a name on the command line.
var rules []*Rule

// register gives a rule its place among those with a name. The order of files does not
// count: names are listed sorted.
func register(r *Rule, operations ...*graph.Operation) *Rule {
	r.operations, rules = operations, append(rules, r)
	return r
}

// rule returns the optimizer's rule; nil where its name is none's.
func (o *Optimizer) rule() *Rule {
	if o.Rule != nil {
		return o.Rule
	}
	for _, r := range rules {
		if r.Name == o.Name {
			return r
		}
	}
	return nil
}

// OptimizerNames lists the update rules in name order.
func OptimizerNames() []string { return namesOf(func(*Rule) bool { return true }) }

// NarrowNames lists those whose states have 16-bit and 8-bit forms.
func NarrowNames() []string { return namesOf(func(r *Rule) bool { return r.Narrow }) }

// NamesReading lists those for which the constant counts.
func NamesReading(c Constant) []string {
	return namesOf(func(r *Rule) bool { return slices.Contains(r.Reads, c) })
}

// Operations returns the operations of all rules that have a name, by kind.
func Operations() (list []*graph.Operation) {
	for _, r := range rules {
		list = append(list, r.operations...)
	}
	slices.SortFunc(list, func(a, b *graph.Operation) int { return cmp.Compare(a.Kind(), b.Kind()) })
	return slices.Compact(list)
}

// Operation returns a rule's operation by its kind, nil for none.
func Operation(kind graph.Kind) *graph.Operation {
	for _, op := range Operations() {
		if op.Kind() == kind {
			return op
		}
	}
	return nil
}

func namesOf(is func(*Rule) bool) []string {
	var names []string
	for _, r := range rules {
		if is(r) {
			names = append(names, r.Name)
		}
	}
	slices.Sort(names)
	return names
}

// Narrow says whether the optimizer's states have 16-bit and 8-bit forms.
func (o Optimizer) Narrow() bool { r := o.rule(); return r != nil && r.Narrow }

// Reads says whether a constant counts.
func (o Optimizer) Reads(c Constant) bool {
	r := o.rule()
	return r != nil && slices.Contains(r.Reads, c)
}

// Validate refuses unknown rules and constants out of range.
func (o Optimizer) Validate() error {
	if o.rule() == nil {
		return fmt.Errorf("optimizer: %q is not known; use one of %s", o.Name, strings.Join(OptimizerNames(), ", "))
	}
	in01 := func(v float64) bool { return v >= 0 && v < 1 }
	switch {
	case !in01(o.Beta1):
		return fmt.Errorf("optimizer: beta1 %g is not in [0, 1)", o.Beta1)
	case !in01(o.Beta2):
		return fmt.Errorf("optimizer: beta2 %g is not in [0, 1)", o.Beta2)
	case !(o.Eps >= 0):
		return fmt.Errorf("optimizer: eps %g is negative or not a number", o.Eps)
	case !(o.Decay >= 0):
		return fmt.Errorf("optimizer: weight decay %g is negative or not a number", o.Decay)
	case o.Int8 && !o.Narrow():
		return fmt.Errorf("optimizer: 8-bit states are %s's, not %s's", strings.Join(NarrowNames(), "'s and "), o.Name)
	case o.BF16 && o.Int8:
		return errors.New("optimizer: states are in bf16 or in 8 bits, not both")
	case o.BF16 && !o.Narrow():
		return fmt.Errorf("optimizer: states in bf16 are %s's, not %s's", strings.Join(NarrowNames(), "'s and "), o.Name)
	case o.Nesterov && !o.Reads(Nesterov):
		return fmt.Errorf("optimizer: %s has no choice of Nesterov's form; use %s", o.Name, strings.Join(NamesReading(Nesterov), ", "))
	case o.Nesterov && o.Beta1 == 0:
		return errors.New("optimizer: Nesterov's form needs momentum (got beta1 0)")
	case !(o.Trust >= 0):
		return fmt.Errorf("optimizer: trust coefficient %g is negative or not a number", o.Trust)
	}
	return nil
}

// HostOnly says whether the rule has operations without a kernel for GPUs.
func (o Optimizer) HostOnly() bool {
	return o.rule().CPUOnly || slices.ContainsFunc(o.Operations(), func(op *graph.Operation) bool {
		d := op.Definition()
		return !d.Library && d.CUDA == nil
	})
}

// Operations returns the operations that the named rule defines.
func (o Optimizer) Operations() []*graph.Operation { return o.rule().operations }

// StateNames returns the flat states of the rule, each as large as the
// parameters, and those with one element a parameter: of Rest's too, where it has one.
func (o Optimizer) StateNames() (flat, perParam []string) {
	r := o.rule()
	flat, perParam = r.States, r.PerParam
	if r.Rest != nil {
		flat, perParam = slices.Concat(flat, r.Rest.States), slices.Concat(perParam, r.Rest.PerParam)
	}
	return flat, perParam
}

// Apart says whether a parameter is Rest's; it is false of all where there is no Rest.
func (o Optimizer) Apart(p *graph.Program, param int) bool {
	r := o.rule()
	return r.Rest != nil && !r.Takes(p, param)
}

// Splits says whether parameters differ in the rule that updates them.
func (o Optimizer) Splits() bool { return o.rule().Rest != nil }

// Of returns the rule that updates a unit's parameters.
func (o Optimizer) Of(p *graph.Program, unit int) *Rule {
	r := o.rule()
	if s := p.Units[unit].Segments; len(s) > 0 && o.Apart(p, s[0].Param) {
		return r.Rest
	}
	return r
}
