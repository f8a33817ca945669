package train

import (
	"encoding/binary"
	"math"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/run"
	"github.com/spillway-ml/spillway/train/saving"
)

// scales tells whether the run has a loss scale.
func (t *Trainer) scales() bool {
	s := t.plan.Program.Scaler
	return s != nil && s.State != graph.NoBuf
}

// startScale gives every rank the loss scale of the first step: from a checkpoint, or as
// configured. A static scale is always the configured one.
func (t *Trainer) startScale(saved *saving.Scale) error {
	t.at.Scale = saving.Scale{Scale: 1}
	if !t.scales() {
		return nil
	}
	scale, dynamic, err := t.cfg.FirstLossScale()
	if err != nil {
		return err
	}
	t.at.Scale = saving.Scale{Scale: scale}
	if saved != nil && dynamic {
		t.at.Scale = *saved
	}
	return t.writeScale()
}

// writeScale gives every rank the loss scale of the next step.
func (t *Trainer) writeScale() error {
	var state [8 * graph.NumScale]byte
	binary.NativeEndian.PutUint64(state[8*graph.ScaleValue:], math.Float64bits(t.at.Scale.Scale))
	binary.NativeEndian.PutUint64(state[8*graph.ScaleClean:], math.Float64bits(t.at.Scale.Clean))
	return t.ranks.Each("the loss scale", func(r *run.Rank) error {
		return r.Exec.Write(t.plan.Program.Scaler.State, 0, state[:])
	})
}

// readScale reads the loss scale after a step. If it has grown beyond the largest, every rank's is
// set back to the largest.
func (t *Trainer) readScale() error {
	if !t.scales() || !t.updates() {
		return nil
	}
	v, err := t.ranks.First().Exec.HostF64(t.ports[graph.PortScale])
	if err != nil {
		return err
	}
	t.at.Scale = saving.Scale{Scale: v[graph.ScaleValue], Clean: v[graph.ScaleClean]}
	if t.at.Scale.Scale <= config.MaxScale {
		return nil
	}
	t.at.Scale.Scale = config.MaxScale
	return t.writeScale()
}

// overflowed decides how to continue after a step that overflowed at the loss scale. A dynamic
// scale is halved and training continues, until the scale cannot be halved. With a static scale, a
// few steps in a row may overflow.
func (t *Trainer) overflowed(e *Diverged, scale float64) (skipped bool) {
	e.LossScale = scale
	if policy := t.cfg.ScalePolicy(); policy.Backoff < 1 {
		return scale > policy.Floor || int64(t.inRow) < policy.Hysteresis
	}
	return t.inRow < config.MaxSkips
}
