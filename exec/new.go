package exec

import (
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
)

// New allocates the arenas and binds the program. If it fails it ends the job on every rank,
// because the others would wait for this one.
func New(cfg Config) (*Executor, error) {
	e, err := build(cfg)
	if err == nil {
		return e, nil
	}
	for _, g := range cfg.Groups {
		g.Abort(err)
	}
	if cfg.Context != nil {
		err = errors.Join(err, cfg.Context.Close())
	}
	return nil, err
}

func build(cfg Config) (*Executor, error) {
	p := cfg.Program
	switch {
	case cfg.Context == nil:
		return nil, errors.New("exec: no device context")
	case p == nil || cfg.Layout == nil || cfg.Library == nil:
		return nil, errors.New("exec: want a program, a layout and a kernel library")
	case len(cfg.Layout.Offset) != len(p.Buffers):
		return nil, fmt.Errorf("exec: the layout has %d offsets, the program %d buffers",
			len(cfg.Layout.Offset), len(p.Buffers))
	case len(cfg.Coord) != len(p.Mesh):
		return nil, fmt.Errorf("exec: %d coordinates for a mesh of %d axes", len(cfg.Coord), len(p.Mesh))
	}
	for i, a := range p.Mesh {
		if cfg.Coord[i] < 0 || cfg.Coord[i] >= a.Size {
			return nil, fmt.Errorf("exec: coordinate %d along mesh axis %s of size %d", cfg.Coord[i], a.Name, a.Size)
		}
	}
	e := &Executor{cfg: cfg, rank: cfg.Context.Rank(), byKernel: map[device.Kernel]*operation{}}
	if cfg.Meter {
		e.meter = &meter{}
	}
	e.cfg.Graphs = cfg.Graphs && cfg.Trace == nil && !cfg.Meter
	e.step.Store(-1)
	for s := range graph.NumSpaces {
		peak := cfg.Layout.Spaces[s].Peak
		if peak == 0 {
			continue
		}
		a, err := cfg.Context.Alloc(s, peak)
		if err != nil {
			return nil, fmt.Errorf("exec: %w", err)
		}
		e.arenas[s] = a
	}
	for range p.Events {
		ev, err := cfg.Context.NewEvent()
		if err != nil {
			return nil, fmt.Errorf("exec: rank %d: event: %w", e.rank, err)
		}
		e.events = append(e.events, ev)
	}
	cfg.Context.OnError(func(err error) {
		for _, g := range cfg.Groups {
			g.Abort(e.describe(err))
		}
	})
	seen := map[comm.Group]bool{}
	for _, g := range cfg.Groups {
		if !seen[g] {
			seen[g] = true
			e.groups = append(e.groups, g)
			g.OnError(cfg.Context.Abort)
		}
	}
	if err := e.bindAll(); err != nil {
		return nil, err
	}
	return e, nil
}

func (e *Executor) bindAll() error {
	p := e.cfg.Program
	e.sections = make([]section, len(p.Sections))
	for i := range p.Sections {
		s := &e.sections[i]
		s.graph = &p.Sections[i]
		s.gate = gateOf(p, s.graph)
		s.phases = make([]phase, len(s.graph.Phases))
		for j := range s.phases {
			ph := &s.phases[j]
			ph.graph, ph.section = &s.graph.Phases[j], s
			ph.ops = make([]operation, len(ph.graph.Ops))
			bound := make([]kernels.Binding, len(ph.ops))
			for k := range ph.ops {
				o := &ph.ops[k]
				o.op, o.phase = &ph.graph.Ops[k], ph
				var err error
				if bound[k], err = e.bind(o); err != nil {
					return fmt.Errorf("exec: rank %d, %s: %w", e.rank, o.path(), err)
				}
			}
			if err := e.join(ph, bound); err != nil {
				return err
			}
		}
		if e.cfg.Poison {
			if err := e.bindReleases(s); err != nil {
				return fmt.Errorf("exec: rank %d, section %s: %w", e.rank, s.graph.Name, err)
			}
		}
		s.bindGate()
	}
	var reads [graph.NumStreams]bool
	inputs := map[graph.BufID]bool{}
	for _, id := range e.cfg.Program.InPorts() {
		root, _ := e.cfg.Program.Resolve(id, nil)
		inputs[root] = true
	}
	e.eachOp(func(o *operation) {
		reads[o.op.Stream] = reads[o.op.Stream] || e.usesHostInput(o.op, inputs)
	})
	for s, yes := range reads {
		if yes {
			e.readers = append(e.readers, e.streams[s])
		}
	}
	return nil
}

// usesHostInput says whether an operation uses one of the host's input buffers (roots). Writing
// counts too, because the program writes PortPrefix.
func (e *Executor) usesHostInput(op *graph.Op, inputs map[graph.BufID]bool) bool {
	return slices.ContainsFunc(operands(op), func(id graph.BufID) bool {
		root, _ := e.cfg.Program.Resolve(id, nil)
		return inputs[root]
	})
}
