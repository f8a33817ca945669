package plan

import (
	"errors"
	"fmt"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/precision"
)

// property is a condition that a program meets between two passes.
type property struct {
	name  string
	holds func(p *graph.Program) error
}

func has(list ...property) []property { return list }

// hold returns the first property that does not hold.
func hold(p *graph.Program, list []property) error {
	for _, pr := range list {
		if err := pr.holds(p); err != nil {
			return fmt.Errorf("the program is not %s: %w", pr.name, err)
		}
	}
	return nil
}

func oneMicro(kind graph.SectionKind) func(p *graph.Program) error {
	return func(p *graph.Program) error {
		if p.SectionOf(kind, graph.FormWhole).Micro() == nil {
			return fmt.Errorf("it has no section %q of one phase", kind)
		}
		return nil
	}
}

var (
	forward = property{"one micro-batch by itself", oneMicro(graph.SectionForward)}
	train   = property{"one micro-batch beside other sections", oneMicro(graph.SectionTrain)}

	// wholeParams: every parameter has a buffer of its own and no unit is laid out.
	wholeParams = property{"of whole parameters", func(p *graph.Program) error {
		for u := range p.Units {
			if p.Units[u].FlatLen != 0 {
				return fmt.Errorf("unit %q is laid out already", p.Units[u].Name)
			}
		}
		return nil
	}}
	// flatParams: every unit with parameters is laid out, and its value is held.
	flatParams = property{"of flat parameters", func(p *graph.Program) error {
		for i := range p.Params {
			if u := &p.Units[p.Params[i].Unit]; u.FlatLen == 0 || u.Value.Len == 0 {
				return fmt.Errorf("unit %q of parameter %q is not laid out", u.Name, p.Params[i].Name)
			}
		}
		return nil
	}}
	// ways: every trained unit has a Gradient (its "way"), and no frozen unit has one.
	ways = property{"told its gradients' ways", func(p *graph.Program) error {
		for i := range p.Params {
			if q := &p.Params[i]; q.Frozen != (p.Units[q.Unit].Grad == nil) {
				return fmt.Errorf("parameter %q: frozen %v, and the gradient of unit %q has a way %v", q.Name, q.Frozen, p.Units[q.Unit].Name, p.Units[q.Unit].Grad != nil)
			}
		}
		return nil
	}}
	// scalars: every update rule's operation reads one of the program's sets of Scalars.
	scalars = property{"updated by its scalars", func(p *graph.Program) error {
		return eachOp(p, func(op *graph.Op) error {
			if _, rule := op.Attr.(graph.UpdateAttr); !rule {
				return nil
			}
			if _, ok := p.ScalarsOf(op); !ok {
				return fmt.Errorf("%s must read one of the %d sets of scalars, all of it from the same set", op.Name, len(p.Scalars))
			}
			return nil
		})
	}}
	// reduced: the last micro-step writes every gradient that an update reads and, if ranks
	// share the work, sums it over each mesh axis of its unit's Gradient.
	reduced = property{"reduced", func(p *graph.Program) error {
		for i := range p.Sections {
			if ph := p.Sections[i].LastMicro(); ph != nil && p.Sections[i].Kind == graph.SectionStep {
				if err := isReduced(p, ph); err != nil {
					return err
				}
			}
		}
		return nil
	}}
	// gathered: no parameter of a unit that is stored in shards has a whole value.
	gathered = property{"gathered", func(p *graph.Program) error {
		for i := range p.Params {
			if q := &p.Params[i]; q.Value != graph.NoBuf && p.Units[q.Unit].Compute.Axis >= 0 {
				return fmt.Errorf("parameter %q is whole, and unit %q in shards", q.Name, p.Units[q.Unit].Name)
			}
		}
		return nil
	}}
	// gradients: every trained parameter has a gradient, no frozen one has.
	gradients = property{"differentiated", func(p *graph.Program) error {
		for i := range p.Params {
			if q := &p.Params[i]; q.Frozen != (q.Grad == graph.NoBuf) {
				return fmt.Errorf("parameter %q: frozen %v, gradient %v", q.Name, q.Frozen, q.Grad != graph.NoBuf)
			}
		}
		return nil
	}}
	onAxes = property{"on a mesh", func(p *graph.Program) error {
		if len(p.Mesh) == 0 {
			return errors.New("it has no axis")
		}
		return nil
	}}
	// hostPorts: every buffer that the host fills or reads has a port.
	hostPorts = property{"given its ports", func(p *graph.Program) error {
		ports := p.Ports()
		for _, need := range []struct {
			buf  graph.BufID
			port graph.Port
		}{{p.Tokens, graph.PortTokens}, {p.Targets, graph.PortTargets}, {p.Positions, graph.PortPositions}, {p.Hyper, graph.PortHyper}, {p.Key, graph.PortKey}, {p.Loss, graph.PortLoss}} {
			if need.buf != graph.NoBuf && ports[need.port] == graph.NoBuf {
				return fmt.Errorf("%q has no port %v", p.Buf(need.buf).Name, need.port)
			}
		}
		return nil
	}}
	// step: each step has its micro-steps, from first to last, then the update if there is
	// one; no section of a single micro-batch is left.
	step = property{"made of steps", func(p *graph.Program) error {
		found := false
		for i := range p.Sections {
			s := &p.Sections[i]
			switch s.Kind {
			case graph.SectionForward, graph.SectionTrain:
				return fmt.Errorf("section %q is left", s.Name)
			case graph.SectionStep:
				found = true
				if ph := s.Phases; len(ph) == 0 || !ph[0].First || s.LastMicro() == nil {
					return fmt.Errorf("section %q has no first and last micro-step", s.Name)
				}
			}
		}
		if !found {
			return errors.New("it has no step")
		}
		return nil
	}}
	// reachable: only copies touch two memory spaces, or a disk.
	reachable = property{"in one memory space an operation", func(p *graph.Program) error {
		return eachOp(p, func(op *graph.Op) error {
			if op.Kind == graph.Copy {
				return nil
			}
			space, err := graph.NumSpaces, error(nil)
			graph.Effects(op, func(e graph.Effect) {
				s := p.Buf(e.Buf).Space
				if s == graph.Disk || space != graph.NumSpaces && s != space {
					err = fmt.Errorf("%s uses %q in %v memory", op.Name, p.Buf(e.Buf).Name, s)
				}
				space = s
			})
			return err
		})
	}}
	// placed: every part of the update has been moved into a section.
	placed = property{"updated", func(p *graph.Program) error {
		if p.SectionOf(graph.SectionUpdate, graph.FormWhole) != nil {
			return errors.New("section \"update\" is left: parts of the update have not been moved into a step")
		}
		return nil
	}}
	noThrottles = property{"scheduled", func(p *graph.Program) error {
		for i := range p.Sections {
			for _, ph := range p.Sections[i].Phases {
				if len(ph.Throttles) > 0 {
					return fmt.Errorf("%s/%s has throttles left", p.Sections[i].Name, ph.Name)
				}
			}
		}
		return nil
	}}
	// savedInt8: buffers that were saved in int8 are read only by products and activation
	// gradients.
	savedInt8     = property{"sparing of statistics", precision.CheckSaved}
	noDeadBuffers = property{"swept", func(p *graph.Program) error {
		if n := p.Unused(); n != 0 {
			return fmt.Errorf("%d buffers are used by nothing", n)
		}
		return nil
	}}
)

// isReduced checks that a step's last micro-step writes the gradients that updates read, and
// sums them over each axis that the unit's Gradient names.
func isReduced(p *graph.Program, ph *graph.Phase) error {
	over := make([]map[int]bool, len(p.Units))
	exchanged := map[int]int{}              // by unit: mesh axis of an all_to_all whose parts are then added
	written := make([]bool, len(p.Buffers)) // by root
	for i := range ph.Ops {
		op := &ph.Ops[i]
		for _, o := range op.Out {
			if o.Buf != graph.NoBuf {
				root, _ := p.Resolve(o.Buf, nil)
				written[root] = true
			}
		}
		if op.Pass != graph.Backward || op.Unit < 0 {
			continue
		}
		if over[op.Unit] == nil {
			over[op.Unit] = map[int]bool{}
		}
		switch op.Kind {
		case graph.ReduceScatter, graph.AllReduce:
			over[op.Unit][op.Attr.(graph.GroupAttr).Axis] = true
		case graph.AllToAll:
			exchanged[op.Unit] = op.Attr.(graph.GroupAttr).Axis
		case graph.DequantizeSum, graph.SumParts:
			if axis, ok := exchanged[op.Unit]; ok {
				over[op.Unit][axis] = true
			}
		}
	}
	for u := range p.Units {
		g := p.Units[u].Grad
		if g == nil {
			continue
		}
		root, _ := p.Resolve(g.Update, nil)
		switch {
		case !written[root]:
			return fmt.Errorf("%s writes nothing to %q, which the update of unit %q reads", ph.Name, p.Buf(root).Name, p.Units[u].Name)
		case g.Axis >= 0 && !over[u][g.Axis], g.Replicas >= 0 && !over[u][g.Replicas]:
			return fmt.Errorf("%s does not sum the gradient of unit %q over all axes of its way", ph.Name, p.Units[u].Name)
		}
	}
	return nil
}

func eachOp(p *graph.Program, visit func(op *graph.Op) error) error {
	for i := range p.Sections {
		for j := range p.Sections[i].Phases {
			ops := p.Sections[i].Phases[j].Ops
			for k := range ops {
				if err := visit(&ops[k]); err != nil {
					return fmt.Errorf("%s/%s: %w", p.Sections[i].Name, p.Sections[i].Phases[j].Name, err)
				}
			}
		}
	}
	return nil
}
