package graph

import "strings"

// Epilogues is a set of what products of 16 bits do besides multiplying, of what a
// rewrite decides because bits depend on it: in the program of every stage, placement and
// recomputation, or in none. A bias is not one of them: its sum is the kernel's.
// The zero value is what the target has by default.
type Epilogues uint8

const (
	NoEpilogues   Epilogues = 1 << iota // a set that was chosen: what is not in it is not done
	EpilogueDGELU                       // an activation's derivative: FuseGradients
	EpilogueGELU                        // an activation of the unrounded sum: Fuse, LinearAct
	EpilogueBGrad                       // the gradient of a bias: FuseBiasGradients
)

// EpilogueNames are the elements of a set by name, in the order in which they are listed,
// each with the operation that its rewrite makes.
var EpilogueNames = []struct {
	Name string
	Set  Epilogues
	Kind Kind
}{{"dgelu", EpilogueDGELU, LinearGradAct}, {"bgrad", EpilogueBGrad, LinearGradWB}, {"gelu", EpilogueGELU, LinearAct}}

// Has says whether all of f are in the set.
func (e Epilogues) Has(f Epilogues) bool { return e&f == f }

// String lists the set's names, "none" for none.
func (e Epilogues) String() string {
	var names []string
	for _, n := range EpilogueNames {
		if e.Has(n.Set) {
			names = append(names, n.Name)
		}
	}
	if names == nil {
		return "none"
	}
	return strings.Join(names, ",")
}

// Epilogues returns what of a set the target's products do, with the default filled in.
func (t Target) Epilogues(chosen Epilogues) Epilogues {
	if chosen == 0 {
		chosen = t.CUDA.Default
	}
	return chosen & t.CUDA.Epilogues
}
