package graph

import (
	"fmt"
	"strings"
)

// verifier checks one program; see Verify. Its checks are in the verify_*.go files.
type verifier struct {
	p       *Program
	regions *Regions // nil until the tables have been checked
	filled  []bool   // by root buffer: has contents that no operation needs to write
}

// each calls check for every operation. An error names section, phase and operation.
func (v *verifier) each(check func(op *Op) error) error {
	for s, ph := range v.p.Phases() {
		for k := range ph.Ops {
			op := &ph.Ops[k]
			if err := check(op); err != nil {
				msg := strings.TrimPrefix(err.Error(), "graph: "+op.Name+" ")
				return fmt.Errorf("%s/%s/%s: %s", s.Name, ph.Name, op.Name, msg)
			}
		}
	}
	return nil
}

// quote returns the name of a buffer, with the name of its root if it is a view.
func (v *verifier) quote(id BufID) string {
	root := v.regions.Of[id].Root
	if root == id {
		return fmt.Sprintf("%q", v.p.bufName(id))
	}
	return fmt.Sprintf("%q (in %q)", v.p.bufName(id), v.p.bufName(root))
}
