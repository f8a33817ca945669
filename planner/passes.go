package planner

import (
	"context"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
)

// Logical returns the model's forward program of a micro-batch, before any pass.
func (r *Resolved) Logical() (*graph.Program, error) {
	fwd, err := planner{Resolved: r, shared: r.Common()}.forward(&r.Request, 0)
	return fwd.Train, err
}

// Passes plans the run that cfg describes. It calls show with the model's program ("model") and
// with the program after each pass, in order. An error from show ends it. show may be nil. Passes
// reads no weights and no data. A plan that does not fit is not an error.
func Passes(ctx context.Context, cfg config.Config, show func(pass string, p *graph.Program) error) error {
	return Request{Config: cfg}.Passes(ctx, show)
}

func (q Request) Passes(ctx context.Context, show func(pass string, p *graph.Program) error) error {
	_, s, err := q.settle(ctx)
	if err != nil {
		return err
	}
	at, err := s.Passes()
	if err != nil {
		return err
	}
	at.Observe = func(pass string, p *graph.Program) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		if show == nil {
			return nil
		}
		return show(pass, p)
	}
	_, err = plan.Build(at.Forward, at.Config)
	return err
}
