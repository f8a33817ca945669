package recompute

import (
	"fmt"
	"path"
	"strings"
)

// Policy says which activations of a unit are dropped.
type Policy uint8

// Policies. Full keeps what a unit hands to others, and computes all else
// again. Selective computes again what costs little for its bytes: norms,
// activation functions, gates, softmax and attention from its q, k and v; the
// outputs of matrix products stay.
const (
	None Policy = iota
	Selective
	Full
)

var policyNames = map[string]Policy{"none": None, "selective": Selective, "full": Full}

// Rule gives the units whose name matches Unit (path.Match) a policy.
type Rule struct {
	Policy Policy
	Unit   string
}

// Options of the rewrite. The first rule that matches a unit's name holds for
// it; a unit without one keeps everything.
type Options struct{ Rules []Rule }

// Active says whether any unit may recompute.
func (o Options) Active() bool {
	for _, r := range o.Rules {
		if r.Policy != None {
			return true
		}
	}
	return false
}

// Parse reads "none", "selective", "full", or policies by unit: parts separated
// by semicolons, each a policy, a colon and patterns of unit names separated by
// commas, as in "full:h.?,h.1*;selective:h.*". "" is none.
func Parse(s string) (Options, error) {
	var o Options
	if s == "" {
		return o, nil
	}
	for _, part := range strings.Split(s, ";") {
		name, patterns, by := strings.Cut(strings.TrimSpace(part), ":")
		policy, ok := policyNames[strings.ToLower(name)]
		switch {
		case strings.EqualFold(name, "auto"):
			return o, fmt.Errorf("recompute: auto is not built yet; use none, selective or full, or a policy by unit such as full:h.*")
		case !ok:
			return o, fmt.Errorf("recompute: policy %q is not known; use none, selective or full", name)
		case !by:
			patterns = "*"
		}
		for _, unit := range strings.Split(patterns, ",") {
			unit = strings.TrimSpace(unit)
			if _, err := path.Match(unit, ""); err != nil || unit == "" {
				return o, fmt.Errorf("recompute: %q is not a pattern of unit names in %q", unit, part)
			}
			o.Rules = append(o.Rules, Rule{policy, unit})
		}
	}
	return o, nil
}

func (o Options) policy(unit string) (Policy, int) {
	for i, r := range o.Rules {
		if ok, _ := path.Match(r.Unit, unit); ok {
			return r.Policy, i
		}
	}
	return None, -1
}
