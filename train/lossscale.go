package train

import (
	"encoding/binary"
	"math"
	"strings"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/decimal"
	"github.com/spillway-ml/spillway/run"
)

// scaleState is the loss scale between two steps, as the program's Scaler has it.
type scaleState struct {
	Scale float64 `json:"scale"` // of the next step
	Clean float64 `json:"clean"` // updates since it last moved; negative: overflows in a row
}

// dynamicScale is Config.LossScale that follows overflows.
const dynamicScale = "dynamic"

// maxScale is the largest loss scale: a gradient of 1 times the scale must be finite in
// fp32, and so must what divides it out again.
const maxScale = 1 << 126

// lossScale returns what Config.LossScale says: the scale of the first step, and
// whether it moves.
func (c *Config) lossScale() (scale float64, dynamic bool, err error) {
	s := strings.ToLower(strings.TrimSpace(c.LossScale))
	if s == "" || s == dynamicScale {
		return graph.InitialLossScale, true, nil
	}
	if !strings.EqualFold(c.precision(), "fp16") {
		return 0, false, refuse("Config.LossScale %.80s: Config.Precision %s has none, its range is fp32's; give it with Config.Precision fp16 or leave it out", s, c.precision())
	}
	scale, err = decimal.Float(s)
	if err != nil || !(scale >= 1 && scale <= maxScale) {
		return 0, false, refuse("Config.LossScale %.80q: use dynamic or a number from 1 to 2^126", c.LossScale)
	}
	return scale, false, nil
}

func validScale(c *Config) error {
	_, dynamic, err := c.lossScale()
	switch n := c.LossScaleHysteresis; {
	case err != nil:
		return err
	case n < 0 || n > maxSkips:
		return refuse("Config.LossScaleHysteresis %d: use 1 to %d overflows in a row", n, maxSkips)
	case n > 1 && (!dynamic || !strings.EqualFold(c.precision(), "fp16")):
		return refuse("Config.LossScaleHysteresis %d: only a dynamic loss scale, of Config.Precision fp16, is halved; leave it out", n)
	}
	return nil
}

// scalePolicy is how the program's loss scale moves.
func (c *Config) scalePolicy() graph.LossScaleAttr {
	if scale, dynamic, err := c.lossScale(); err == nil && !dynamic {
		return graph.LossScaleAttr{Growth: 1, Backoff: 1, Floor: scale, Interval: 1}
	}
	policy := graph.DefaultLossScale
	if c.LossScaleHysteresis > 1 {
		policy.Hysteresis = int64(c.LossScaleHysteresis)
	}
	return policy
}

// scales tells whether the run has a loss scale.
func (t *Trainer) scales() bool {
	s := t.plan.Program.Scaler
	return s != nil && s.State != graph.NoBuf
}

// startScale gives every rank the loss scale of the first step: a checkpoint's, or
// what is configured. A static scale is always the configured one.
func (t *Trainer) startScale(saved *scaleState) error {
	t.scale = scaleState{Scale: 1}
	if !t.scales() {
		return nil
	}
	scale, dynamic, err := t.cfg.lossScale()
	if err != nil {
		return err
	}
	t.scale = scaleState{Scale: scale}
	if saved != nil && dynamic {
		t.scale = *saved
	}
	return t.writeScale()
}

// writeScale gives every rank the loss scale of the next step.
func (t *Trainer) writeScale() error {
	var state [8 * graph.NumScale]byte
	binary.NativeEndian.PutUint64(state[8*graph.ScaleValue:], math.Float64bits(t.scale.Scale))
	binary.NativeEndian.PutUint64(state[8*graph.ScaleClean:], math.Float64bits(t.scale.Clean))
	return t.ranks.Each("the loss scale", func(r *run.Rank) error {
		return r.Exec.Write(t.plan.Program.Scaler.State, 0, state[:])
	})
}

// readScale takes the loss scale that a step has left. One that has grown beyond the
// largest is set back to it, on every rank.
func (t *Trainer) readScale() error {
	if !t.scales() || !t.updates() {
		return nil
	}
	v, err := t.ranks.First().Exec.HostF64(t.ports[graph.PortScale])
	if err != nil {
		return err
	}
	t.scale = scaleState{v[graph.ScaleValue], v[graph.ScaleClean]}
	if t.scale.Scale <= maxScale {
		return nil
	}
	t.scale.Scale = maxScale
	return t.writeScale()
}

// overflowed decides what becomes of a step that overflowed at the loss scale: a
// dynamic scale is halved and training goes on, until it cannot be halved; at a
// static one, some steps in a row may overflow.
func (t *Trainer) overflowed(e *Diverged, scale float64) (skipped bool) {
	e.LossScale = scale
	if policy := t.cfg.scalePolicy(); policy.Backoff < 1 {
		return scale > policy.Floor || int64(t.skipped.inRow) < policy.Hysteresis
	}
	return t.skipped.inRow < maxSkips
}
