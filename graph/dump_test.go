package graph_test

import (
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/graph"
)

// dump writes the operations of a program's first phase, one a line:
//
//	name: kind(inputs) → outputs, with += for accumulation and ~ for in place.
func dump(p *graph.Program) string { return dumpOps(p, p.Sections[0].Phases[0].Ops) }

func dumpOps(p *graph.Program, ops []graph.Op) string {
	var b strings.Builder
	name := func(id graph.BufID) string {
		if id == graph.NoBuf {
			return "_"
		}
		return p.Buf(id).Name
	}
	for _, op := range ops {
		var in, out []string
		for _, id := range op.In {
			in = append(in, name(id))
		}
		for _, o := range op.Out {
			out = append(out, map[graph.Mode]string{graph.Write: "", graph.Accum: "+=", graph.ReadWrite: "~"}[o.Mode]+name(o.Buf))
		}
		fmt.Fprintf(&b, "%s: %s(%s) → %s\n", op.Name, op.Kind, strings.Join(in, ", "), strings.Join(out, ", "))
	}
	return b.String()
}

func backward(p *graph.Program) string {
	ops := p.Sections[0].Phases[0].Ops
	for i := range ops {
		if ops[i].Pass == graph.Backward {
			return dumpOps(p, ops[i:])
		}
	}
	return ""
}
