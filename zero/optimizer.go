package zero

import (
	"fmt"
	"sort"
	"strings"

	"github.com/spillway-ml/spillway/graph"
)

// ExactLimbs is the length of an exact accumulator in int64 (package
// kernels/cpu/exact, whose test holds it to this number).
const ExactLimbs = 72

// Optimizer is an update rule with its constants. What changes by step (rate,
// bias corrections, clip coefficient) reaches it through the Hyper buffer.
type Optimizer struct {
	Name         string // adamw, sgd, lamb, lars, larc, novograd
	Rule         *Rule  // in place of the one that Name names; nil: that one
	Beta1, Beta2 float64
	Eps          float64
	Decay        float64 // on parameters whose Decay is set
	Trust        float64 // LARS and LARC: trust coefficient η
	Nesterov     bool    // SGD
	// AdaptAll adapts LAMB's, LARS's and LARC's rate to the norms of every
	// parameter, as the papers are written. Otherwise parameters without Decay
	// (biases, norms) keep the unadapted rate, as the recipes of these optimizers
	// do: a bias that starts at zero has no norm to adapt to.
	AdaptAll bool
	// LossScale is how the scale of a program that has one moves; its zero value
	// stands for graph.DefaultLossScale.
	LossScale graph.LossScaleAttr
	// Int8 keeps AdamW's moments in 8 bits (graph.State).
	Int8 bool
	// BF16 keeps AdamW's parameters, without a master, and moments in bf16, rounded
	// stochastically.
	BF16 bool
}

// Rule is an update rule as a value. A new one is a file with a value of this
// type, its place in rules (or in the spec, as Optimizer.Rule), and its kernels.
type Rule struct {
	Name     string
	States   []string // flat states beside the parameters
	PerParam []string // states with one element a parameter
	Source   string   // of the method
	// Emit writes a unit's operations.
	Emit func(e *Emitter, t *Target)
}

// rules are those that have a name on the command line.
var rules = []*Rule{&AdamW, &SGD, &LAMB, &LARS, &LARC, &NovoGrad}

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
func OptimizerNames() []string {
	var names []string
	for _, r := range rules {
		names = append(names, r.Name)
	}
	sort.Strings(names)
	return names
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
	case o.Int8 && o.Name != "adamw":
		return fmt.Errorf("optimizer: 8-bit states are adamw's, not %s's", o.Name)
	case o.BF16 && (o.Name != "adamw" || o.Int8):
		return fmt.Errorf("optimizer: states in bf16 are adamw's, in 16 bits or 8, not both; not %s's", o.Name)
	case !(o.Trust >= 0):
		return fmt.Errorf("optimizer: trust coefficient %g is negative or not a number", o.Trust)
	}
	return nil
}

// StateNames returns the flat states of the rule, each as large as the
// parameters, and those with one element a parameter.
func (o Optimizer) StateNames() (flat, perParam []string) {
	r := o.rule()
	return r.States, r.PerParam
}
