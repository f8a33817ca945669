package graph

import "strings"

// Epilogues is a set of operations that a matrix product of 16 bits does in its epilogue. It lists
// only operations for which a rewrite must choose, because the result's bits depend on the choice.
// A choice then holds for every stage, placement and recomputation of a model. Adding a bias is not
// listed: a Linear's kernel always does it. The zero value is the target's default.
type Epilogues uint8

const (
	NoEpilogues   Epilogues = 1 << iota // marks an explicit choice, as opposed to the default
	EpilogueDGELU                       // multiplies by an activation's derivative: FuseGradients
	EpilogueGELU                        // applies an activation to the unrounded sum: Fuse, LinearAct
	EpilogueBGrad                       // sums the gradient of a bias: FuseBiasGradients
)

// EpilogueNames lists the elements of a set in the order of String. Kind is the kind of operation
// that the element's rewrite creates.
var EpilogueNames = []struct {
	Name string
	Set  Epilogues
	Kind Kind
}{{"dgelu", EpilogueDGELU, LinearGradAct}, {"bgrad", EpilogueBGrad, LinearGradWB}, {"gelu", EpilogueGELU, LinearAct}}

// Has says whether all elements of f are in the set.
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
