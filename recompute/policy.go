package recompute

import (
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/graph"
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

// Rule gives the units whose name matches Unit (graph.MatchName) a policy.
type Rule struct {
	Policy Policy
	Unit   string
}

// Options of the rewrite. The first rule that matches a unit's name holds for
// it; a unit without one keeps everything but the buffers that Drop names.
type Options struct {
	Rules []Rule
	// Drop has patterns (graph.MatchName) of activations that are computed again
	// whatever their unit's policy: what an operation computes beside the first of
	// its results goes with that, but for a pre-activation that a fused product
	// writes and its activation can be made from (graph.Linear). See Candidates for what can be dropped.
	Drop []string
}

// Active says whether any unit may recompute.
func (o Options) Active() bool {
	if len(o.Drop) > 0 {
		return true
	}
	for _, r := range o.Rules {
		if r.Policy != None {
			return true
		}
	}
	return false
}

// Auto is what asks a search for Options; Parse refuses it.
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
		policy, ok := policyNames[strings.ToLower(name)]
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
		case !ok:
			return o, fmt.Errorf("recompute: policy %.80q is not known; use none, selective, full or auto, or drop with the names of buffers", name)
		case !by:
			patterns = "*"
		}
		for _, unit := range strings.Split(patterns, ",") {
			unit = strings.TrimSpace(unit)
			if err := graph.CheckPattern(unit); err != nil {
				return o, fmt.Errorf("recompute: not a pattern of unit names in %.80q: %w", part, err)
			}
			o.Rules = append(o.Rules, Rule{policy, unit})
		}
	}
	return o, nil
}

// String writes options as Parse reads them; "none" where nothing is computed again.
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

// String is a policy's name, as Parse reads it.
func (p Policy) String() string {
	for name, q := range policyNames {
		if p == q {
			return name
		}
	}
	return fmt.Sprintf("policy(%d)", uint8(p))
}

func (o Options) policy(unit string) (Policy, int) {
	for i, r := range o.Rules {
		if ok, _ := graph.MatchName(r.Unit, unit); ok {
			return r.Policy, i
		}
	}
	return None, -1
}
