package train

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/run"
)

// expect sees that the checkpoint holds exactly the states that its optimizer has:
// without one of them training would go on from zeros and say nothing.
// What another optimizer wrote is not looked at.
func (t *Trainer) expect(c checkpoint.Entry) error {
	var was runRecord
	if err := json.Unmarshal(c.Manifest.Run, &was); err != nil {
		return fmt.Errorf("%w: %s: its run can't be read: %w", checkpoint.ErrDamaged, c.Folder, err)
	}
	if was.Optimizer != t.cfg.UpdateRule().Name {
		return nil
	}
	flat, perParam := t.cfg.UpdateRule().StateNames()
	known := append([]string{checkpoint.ModelState}, append(flat, perParam...)...)
	for _, name := range c.Manifest.States() {
		if !slices.Contains(known, name) {
			return fmt.Errorf("%w: %s holds %s, which Config.Optimizer %s does not have", checkpoint.ErrDamaged, c.Folder, name, was.Optimizer)
		}
	}
	for _, name := range known {
		needed := name == checkpoint.ModelState || was.Data == nil || was.Trained > 0
		if needed && !c.Manifest.Has(name) {
			return fmt.Errorf("%w: %s holds no %s", checkpoint.ErrDamaged, c.Folder, name)
		}
	}
	return nil
}

// restore loads every state of every parameter. Parameters that were frozen when it
// was saved have none of the optimizer's there: theirs stay zero.
func (t *Trainer) restore(ctx context.Context, c *checkpoint.Checkpoint) error {
	held, err := c.Contents()
	if err != nil {
		return fmt.Errorf("resume: %w", err)
	}
	p := t.plan.Program
	for i := range p.Params {
		name := p.Params[i].Name
		tensor := held[name]
		var present, absent string // a state's name that is there, and one that is not
		for _, st := range t.states.Names(i) {
			switch state := run.Saved(st.Name); {
			case slices.Contains(tensor.States, state):
				if state != checkpoint.ModelState {
					present = state
				}
			case state == checkpoint.ModelState:
				return fmt.Errorf("resume: %w: %s has no tensor %q", checkpoint.ErrDamaged, c.Folder, name)
			default:
				absent = state
			}
		}
		if present != "" && absent != "" {
			return fmt.Errorf("resume: %w: %s holds %s of %q and no %s", checkpoint.ErrDamaged, c.Folder, present, name, absent)
		}
		if !equalShape(tensor.Shape, p.Params[i].Shape) {
			return fmt.Errorf("resume: %s: tensor %q has shape %v; the model needs %v", c.Folder, name, tensor.Shape, p.Params[i].Shape)
		}
	}
	if err := t.ranks.Load(ctx, c); errors.Is(err, checkpoint.ErrDamaged) {
		return err // it names the file
	} else if err != nil {
		return fmt.Errorf("resume from %s: %w", c.Folder, err)
	}
	return nil
}
