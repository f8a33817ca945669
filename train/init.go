package train

import (
	"context"
	"fmt"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/run"
	"github.com/spillway-ml/spillway/train/initial"
)

// initialize gives every state its first values. The program's "init" section writes zeros;
// then parameters come from Init, or all states from a checkpoint.
func (t *Trainer) initialize(ctx context.Context) error {
	if err := t.zero(); err != nil {
		return err
	}
	if err := t.startScale(nil); err != nil {
		return fmt.Errorf("initialise: %w", err)
	}
	if err := t.firstValues(ctx); err != nil {
		return err
	}
	return t.refresh()
}

// firstValues writes the initial values of the parameters, or of every state when the run
// resumes.
func (t *Trainer) firstValues(ctx context.Context) error {
	if t.cfg.Resume {
		resumed, err := t.resume(ctx)
		if err != nil || resumed {
			return err
		}
	}
	notes, err := initial.Write(ctx, initial.Run{Config: t.cfg.Resolved, Plan: t.plan, States: t.states, Pool: t.pool, Folders: t.cfg.opener(), Opened: t.cfg.opened, Base: &t.at.Base})
	t.notes = append(t.notes, notes...)
	return err
}

// refresh recomputes the 16-bit parameters from the fp32 master weights that the host has
// written.
func (t *Trainer) refresh() error {
	if t.plan.Program.SectionOf(graph.SectionRefresh, graph.FormWhole) == nil {
		return nil
	}
	return t.ranks.Each("the rounding of parameters to 16 bits", func(r *run.Rank) error {
		return r.Exec.RunSection(graph.SectionRefresh.String(), nil)
	})
}
