package zero

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/graph"
)

// ExactLimbs is the length of an exact accumulator in int64. A test of package kernels/cpu/exact
// checks that it has this length.
const ExactLimbs = 72

// Optimizer is an update rule with its constants. Values that change with the step (rate, bias
// corrections, clip coefficient) reach it through the Hyper buffer.
type Optimizer struct {
	Name         string // one of OptimizerNames
	Rule         *Rule  // replaces the rule with the name Name; nil: Name selects the rule
	Beta1, Beta2 float64
	Eps          float64
	Decay        float64 // weight decay of parameters whose Decay is set
	Trust        float64 // trust coefficient η, for rules that read it
	Nesterov     bool    // use Nesterov momentum
	// AdaptAll makes rules that adapt a rate to norms do so for every parameter, as in the papers.
	// Otherwise parameters without Decay (biases, norms) keep the unadapted rate, as in the usual
	// recipes of these optimizers: a bias that starts at zero has no norm to adapt to.
	AdaptAll bool
	// LossScale is the policy of dynamic loss scaling; its zero value means graph.DefaultLossScale.
	LossScale graph.LossScaleAttr
	// Int8 stores the states of a rule with Rule.Narrow in 8 bits (graph.State).
	Int8 bool
	// BF16 stores states and parameters in bf16, rounded stochastically, without an fp32 master.
	BF16 bool
}

// Constant names a constant of Optimizer that only some rules use.
type Constant string

// Constants.
const (
	Beta1    Constant = "beta1"    // decay of the first moment, or momentum
	Beta2    Constant = "beta2"    // decay of the second moment
	Eps      Constant = "eps"      // term added to a divisor
	Trust    Constant = "trust"    // factor of the rate; 0 would train nothing
	AdaptAll Constant = "adaptAll" // selects the parameters whose rates are scaled by norms
	Nesterov Constant = "nesterov" // selects Nesterov's form of momentum
)

// Rule is an update rule. To add one, write a file that registers a value of this type (or set
// Optimizer.Rule), and its kernels.
type Rule struct {
	Name     string
	States   []string // flat states in addition to the parameters
	PerParam []string // states with one element a parameter
	Source   string   // publication of the method
	// Narrow says that its kernels also support states in 8 bits, and bf16 without masters:
	// Optimizer.Int8 and BF16.
	Narrow bool
	// CPUOnly says that the kernel libraries have its kernels only for the CPU.
	CPUOnly bool
	// Reads lists the constants that it uses.
	Reads []Constant
	// Takes selects the trained parameters that it updates; Rest updates the others. A unit has
	// parameters of only one of the two (Optimizer.Apart). nil: all.
	Takes func(p *graph.Program, param int) bool
	Rest  *Rule
	// Emit adds the operations for one unit.
	Emit func(e *Emitter, t *Target)

	operations []*graph.Operation // of a registered rule
}

// rules are the rules with a name on the command line.
var rules []*Rule

// register adds a rule with a name. The order of files does not matter: names are listed sorted.
func register(r *Rule, operations ...*graph.Operation) *Rule {
	r.operations, rules = operations, append(rules, r)
	return r
}

// rule returns the optimizer's rule; nil if no rule has its name.
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

// NarrowNames lists the rules whose states have 16-bit and 8-bit forms.
func NarrowNames() []string { return namesOf(func(r *Rule) bool { return r.Narrow }) }

// NamesReading lists the rules that use the constant.
func NamesReading(c Constant) []string {
	return namesOf(func(r *Rule) bool { return slices.Contains(r.Reads, c) })
}

// Operations returns the operations of all registered rules.
func Operations() (list []*graph.Operation) {
	for _, r := range rules {
		list = append(list, r.operations...)
	}
	slices.SortFunc(list, func(a, b *graph.Operation) int { return cmp.Compare(a.Kind(), b.Kind()) })
	return slices.Compact(list)
}

// Operation returns the operation of a kind that a rule defines, nil for none.
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

// Reads says whether the rule uses a constant.
func (o Optimizer) Reads(c Constant) bool {
	r := o.rule()
	return r != nil && slices.Contains(r.Reads, c)
}

// Validate returns an error for unknown rules and constants out of range.
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

// StateNames returns the flat states of the rule, each as large as the parameters, and the states
// with one element a parameter. It includes those of Rest.
func (o Optimizer) StateNames() (flat, perParam []string) {
	r := o.rule()
	flat, perParam = r.States, r.PerParam
	if r.Rest != nil {
		flat, perParam = slices.Concat(flat, r.Rest.States), slices.Concat(perParam, r.Rest.PerParam)
	}
	return flat, perParam
}

// Apart says whether Rest updates a parameter; it is always false without a Rest.
func (o Optimizer) Apart(p *graph.Program, param int) bool {
	r := o.rule()
	return r.Rest != nil && !r.Takes(p, param)
}

// Splits says whether different rules update different parameters.
func (o Optimizer) Splits() bool { return o.rule().Rest != nil }

// Of returns the rule that updates a unit's parameters.
func (o Optimizer) Of(p *graph.Program, unit int) *Rule {
	r := o.rule()
	if s := p.Units[unit].Segments; len(s) > 0 && o.Apart(p, s[0].Param) {
		return r.Rest
	}
	return r
}
