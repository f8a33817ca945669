package graph

import "fmt"

// Freeze marks the parameters whose name matches pattern as frozen: they get no
// gradient and no optimizer state. In a pattern, * stands for any characters,
// dots too, ? for one; "h.0.*" is the first block of a GPT-2. A unit whose
// parameters are all frozen is frozen too. It returns how many parameters
// matched; none is an error. Call it before Differentiate.
func Freeze(p *Program, pattern string) (int, error) {
	n := 0
	for i := range p.Params {
		pr := &p.Params[i]
		if !matchName(pattern, pr.Name) {
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

// matchName matches with * and ?. A star remembers where it stood, so that a
// mismatch later takes one more character into it: linear in practice, never
// exponential.
func matchName(pattern, name string) bool {
	p, n, star, mark := 0, 0, -1, 0
	for n < len(name) {
		switch {
		case p < len(pattern) && pattern[p] == '*':
			star, mark = p, n
			p++
		case p < len(pattern) && (pattern[p] == '?' || pattern[p] == name[n]):
			p++
			n++
		case star >= 0:
			mark++
			p, n = star+1, mark
		default:
			return false
		}
	}
	for p < len(pattern) && pattern[p] == '*' {
		p++
	}
	return p == len(pattern)
}
