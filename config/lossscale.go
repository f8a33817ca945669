package config

import (
	"strings"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/decimal"
)

// MaxScale is the largest loss scale. A gradient of 1 times the scale must be finite in fp32,
// and so must the inverse of the scale.
const MaxScale = 1 << 126

// FirstLossScale returns the scale of the first step, from Config.LossScale, and whether it is
// dynamic.
func (c *Config) FirstLossScale() (scale float64, dynamic bool, err error) {
	s := strings.ToLower(strings.TrimSpace(c.LossScale))
	if s == "" || s == DynamicScale {
		return graph.InitialLossScale, true, nil
	}
	if !strings.EqualFold(c.PrecisionName(), "fp16") {
		return 0, false, Refuse("Config.LossScale %.80s: Config.Precision %s has none, its range is fp32's; give it with Config.Precision fp16 or leave it out", s, c.PrecisionName())
	}
	scale, err = decimal.Float(s)
	if err != nil || !(scale >= 1 && scale <= MaxScale) {
		return 0, false, Refuse("Config.LossScale %.80q: use dynamic or a number from 1 to 2^126", c.LossScale)
	}
	return scale, false, nil
}

func validScale(c *Config) error {
	_, dynamic, err := c.FirstLossScale()
	switch n := c.LossScaleHysteresis; {
	case err != nil:
		return err
	case n < 0 || n > MaxSkips:
		return Refuse("Config.LossScaleHysteresis %d: use 1 to %d overflows in a row", n, MaxSkips)
	case n > 1 && (!dynamic || !strings.EqualFold(c.PrecisionName(), "fp16")):
		return Refuse("Config.LossScaleHysteresis %d: only a dynamic loss scale, of Config.Precision fp16, is halved; leave it out", n)
	}
	return nil
}

// ScalePolicy returns the rule by which the program's loss scale changes.
func (c *Config) ScalePolicy() graph.LossScaleAttr {
	if scale, dynamic, err := c.FirstLossScale(); err == nil && !dynamic {
		return graph.LossScaleAttr{Growth: 1, Backoff: 1, Floor: scale, Interval: 1}
	}
	policy := graph.DefaultLossScale
	if c.LossScaleHysteresis > 1 {
		policy.Hysteresis = int64(c.LossScaleHysteresis)
	}
	return policy
}

// MaxSkips is how many non-finite steps in a row Config.OnNonFinite skip allows. More steps would
// only repeat them.
const MaxSkips = 10

func (cfg *Config) SkipsNonFinite() bool { return strings.EqualFold(cfg.OnNonFinite, "skip") }
