package plan

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan"
	"github.com/spillway-ml/spillway/memplan/cost"
)

// ready validates the configuration and divides layers over its stages by the predicted time of
// their operations, forward and backward.
func (sh *Shared) ready(fwd Forward, c Config) (Config, error) {
	err := c.Validate()
	if err != nil || c.Pipeline < 2 || c.Stages != nil {
		return c, err
	}
	s := Spec{c, fwd}
	s.Observe = nil
	c.Stages, err = sh.divided(s, func() ([]int, error) {
		p, err := sh.rewrite(s, "prefix")
		if err != nil {
			return nil, err
		}
		m := c.Dividing
		if m == nil {
			m = cost.CPU(1, 1)
		}
		stages, err := Divide(p, c.Pipeline, func(op *graph.Op) float64 { return m.Op(p, op).Alone })
		if err != nil {
			return nil, fmt.Errorf("Config.Pipeline %d with Config.Ranks %d: %w, and ranks that they divide",
				c.Pipeline, c.Ranks, err)
		}
		return stages, nil
	})
	return c, err
}

// Of returns the role of a rank. The pipeline's axis is the first of the mesh.
func (p *Plan) Of(rank int) *Role {
	return &p.Roles[rank/max(p.Config.Ranks/len(p.Roles), 1)]
}

// Largest returns the role that needs the most of a memory space; the first of equal ones.
func (p *Plan) Largest(s graph.Space) *Role {
	most := &p.Roles[0]
	for i := range p.Roles {
		if p.Roles[i].Layout.Spaces[s].Peak > most.Layout.Spaces[s].Peak {
			most = &p.Roles[i]
		}
	}
	return most
}

// Programs lists the program of each role.
func (p *Plan) Programs() (list []*graph.Program) {
	for i := range p.Roles {
		list = append(list, p.Roles[i].Program)
	}
	return list
}

// roles returns the roles of a program, with their lower bounds where the configuration asks for
// them. With one role, p is its program. With several, p has no events yet, and each role's part is
// scheduled.
func (s *Spec) roles(p *graph.Program) ([]Role, error) {
	roles, errs := make([]Role, s.stages()), make([]error, s.stages())
	switch {
	case len(roles) == 1:
		roles[0].Program = p
		return roles, roles[0].bound(s.Config)
	case s.Early || s.BoundsOnly: // later stages need no program if one does not fit
		for stage := range roles {
			if err := s.role(p, stage, &roles[stage]); err != nil {
				return nil, err
			}
		}
	default:
		Parallel(len(roles), func(stage int) { errs[stage] = s.role(p, stage, &roles[stage]) })
		if err := cmp.Or(errs...); err != nil {
			return nil, err
		}
	}
	for stage := range roles {
		if s.Observe != nil {
			if err := s.Observe(fmt.Sprintf("schedule-stage-%d", stage), roles[stage].Program); err != nil {
				return nil, err
			}
		}
	}
	return roles, nil
}

// role sets r to the scheduled part of p that a stage runs.
func (s *Spec) role(p *graph.Program, stage int, r *Role) (err error) {
	own := *s
	own.Observe = nil
	q, ids := p.Role(stage)
	r.ids = ids
	q.Yield()
	if r.Program, err = rewrite(own, sizeStaging(q), "schedule", ""); err != nil {
		return fmt.Errorf("stage %d: %w", stage, err)
	}
	return r.bound(s.Config)
}

// bound returns a *DoesNotFit if Config.Early is set and the role's lower bound exceeds a capacity.
// With BoundsOnly it sets the layout to the bounds.
func (r *Role) bound(cfg Config) error {
	if !cfg.Early && !cfg.BoundsOnly {
		return nil
	}
	var err error
	if r.analysis, err = memplan.Analyse(r.Program); err != nil {
		return fmt.Errorf("plan: memory: %w", err)
	}
	bounds := r.analysis.Bounds()
	if cfg.BoundsOnly {
		r.Layout, r.analysis = &memplan.Layout{Spaces: bounds}, nil
	}
	if cfg.Early {
		err = overBound(bounds, cfg)
	}
	if err == nil && cfg.Early && !cfg.BoundsOnly {
		err = graph.Verify(r.Program)
	}
	return err
}

// place lays out the buffers of every role that has no layout yet, and sets the plan's Layout.
func (p *Plan) place(cfg Config, known *memplan.Known) error {
	errs := make([]error, len(p.Roles))
	Parallel(len(p.Roles), func(i int) {
		if r := &p.Roles[i]; r.Layout == nil {
			errs[i] = r.place(cfg, known)
		}
	})
	if err := cmp.Or(errs...); err != nil {
		return err
	}
	most := *p.Largest(graph.Device).Layout
	for s := range graph.NumSpaces {
		most.Spaces[s] = p.Largest(s).Layout.Spaces[s]
	}
	p.Layout = &most
	return nil
}

// place lays out the buffers of a role.
func (r *Role) place(cfg Config, known *memplan.Known) (err error) {
	a := r.analysis
	if r.analysis = nil; a == nil {
		a, err = memplan.Analyse(r.Program)
	}
	if err == nil {
		r.Layout, err = a.Assign(memplan.Options{Align: cfg.Target.Align, Stop: cfg.goOn, Known: known})
	}
	var left *stopped
	if err != nil && !errors.As(err, &left) {
		err = fmt.Errorf("plan: memory: %w", err)
	}
	return err
}
