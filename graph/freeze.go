package graph

import "fmt"

// Freeze marks the parameters whose name matches pattern as frozen: they get no gradient
// and no optimizer state. The pattern is that of MatchName, in which * also matches dots:
// "h.0.*" is the first block of a GPT-2, "h.{0-3}.*" the first four. A unit whose
// parameters are all frozen is frozen too. Freeze returns how many parameters matched; it
// is an error if none does. Call it before Differentiate.
func Freeze(p *Program, pattern string) (int, error) {
	if pattern != "" { // which matches no name
		if err := CheckPattern(pattern); err != nil {
			return 0, fmt.Errorf("graph: freeze: %w", err)
		}
	}
	n := 0
	for i := range p.Params {
		pr := &p.Params[i]
		if ok, _ := MatchName(pattern, pr.Name); !ok {
			continue
		}
		if pr.Grad != NoBuf {
			return n, fmt.Errorf("graph: freeze %s: it has a gradient already; freeze before differentiating", pr.Name)
		}
		pr.Frozen = true
		n++
	}
	if n == 0 {
		return 0, fmt.Errorf("graph: freeze %q: no parameter matches; the first is named %q", pattern, firstParam(p))
	}
	trainable, has := make([]bool, len(p.Units)), make([]bool, len(p.Units))
	for i := range p.Params {
		u := p.Params[i].Unit
		if u >= 0 && u < len(p.Units) {
			has[u] = true
			trainable[u] = trainable[u] || !p.Params[i].Frozen
		}
	}
	for u := range p.Units {
		p.Units[u].Frozen = has[u] && !trainable[u]
	}
	return n, nil
}

func firstParam(p *Program) string {
	if len(p.Params) == 0 {
		return ""
	}
	return p.Params[0].Name
}
