package recompute

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/graph"
)

// Policy says which activations of a unit are dropped.
type Policy uint8

// Policies. Full keeps the values that a unit passes to other units and recomputes the rest.
// Selective recomputes values that cost little time for their bytes: norms, activation functions,
// gates, softmax, and attention from its q, k and v. It keeps the outputs of matrix products.
const (
	None Policy = iota
	Selective
	Full
)

var policyNames = []string{"none", "selective", "full"}

// Rule sets the policy of the units whose name matches Unit (graph.MatchName).
type Rule struct {
	Policy Policy
	Unit   string
}

// Options of the rewrite. A unit gets the policy of the first rule that matches its name. A unit
// without a rule keeps everything except buffers that Drop names.
type Options struct {
	Rules []Rule
	// Drop has patterns (graph.MatchName) of activations that are recomputed under every policy.
	// Dropping the first result of an operation also drops its other results, except a fused
	// product's pre-activation, from which the activation can be recomputed (graph.Linear).
	// Candidates lists the activations that can be dropped.
	Drop []string
}

// Active says whether any unit may recompute.
func (o Options) Active() bool {
	return len(o.Drop) > 0 || slices.ContainsFunc(o.Rules, func(r Rule) bool { return r.Policy != None })
}

// Auto is the flag value that makes a search choose Options; Parse rejects it.
const Auto = "auto"

// Parse reads "none", "selective", "full", or policies by unit: parts separated
// by semicolons, each a policy, a colon and patterns of unit names separated by
// commas, as in "full:h.?,h.1*;selective:h.*". A part "drop:" names buffers
// instead, as in "drop:h.{0-11}.mlp.act,h.*.ln_1". "" is none.
func Parse(s string) (Options, error) {
	var o Options
	if s == "" {
		return o, nil
	}
	for _, part := range strings.Split(s, ";") {
		name, patterns, by := strings.Cut(strings.TrimSpace(part), ":")
		policy := slices.Index(policyNames, strings.ToLower(name))
		switch {
		case strings.EqualFold(name, Auto):
			return o, fmt.Errorf("recompute: auto stands alone: it chooses for every buffer")
		case strings.EqualFold(name, "drop"):
			if !by {
				return o, fmt.Errorf("recompute: drop needs the names of buffers, as in drop:h.*.mlp.act")
			}
			for _, buf := range strings.Split(patterns, ",") {
				buf = strings.TrimSpace(buf)
				if err := graph.CheckPattern(buf); err != nil {
					return o, fmt.Errorf("recompute: %w in %.80q", err, part)
				}
				o.Drop = append(o.Drop, buf)
			}
			continue
		case policy < 0:
			return o, fmt.Errorf("recompute: policy %.80q is not known; use none, selective, full or auto, or drop with the names of buffers", name)
		case !by:
			patterns = "*"
		}
		for _, unit := range strings.Split(patterns, ",") {
			unit = strings.TrimSpace(unit)
			if err := graph.CheckPattern(unit); err != nil {
				return o, fmt.Errorf("recompute: not a pattern of unit names in %.80q: %w", part, err)
			}
			o.Rules = append(o.Rules, Rule{Policy(policy), unit})
		}
	}
	return o, nil
}

// String formats options for Parse; "none" if nothing is recomputed.
func (o Options) String() string {
	if !o.Active() {
		return "none"
	}
	var parts []string
	for i := 0; i < len(o.Rules); {
		r := o.Rules[i]
		var units []string
		for ; i < len(o.Rules) && o.Rules[i].Policy == r.Policy; i++ {
			units = append(units, o.Rules[i].Unit)
		}
		text := r.Policy.String()
		if len(units) > 1 || units[0] != "*" {
			text += ":" + strings.Join(units, ",")
		}
		parts = append(parts, text)
	}
	if len(o.Drop) > 0 {
		parts = append(parts, "drop:"+strings.Join(o.Drop, ","))
	}
	return strings.Join(parts, ";")
}

// String returns a policy's name, which Parse reads.
func (p Policy) String() string {
	return policyNames[p]
}

func (o Options) policy(unit string) Policy {
	for _, r := range o.Rules {
		if matches(r.Unit, unit) {
			return r.Policy
		}
	}
	return None
}

// matches does the same as graph.MatchName for a pattern that Parse has checked.
func matches(pattern, name string) bool {
	ok, _ := graph.MatchName(pattern, name)
	return ok
}
