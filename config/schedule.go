package config

import (
	"math"
	"strings"
)

// LearningRate returns the rate of a step (from 0): linear warm-up over Warmup
// steps, then the schedule, which reaches MinLR at the last step where it
// decays. The peak is LR, scaled with the step's rows as LRScale says
// (linear: Goyal et al., Accurate, Large Minibatch SGD, 2017; sqrt: Hoffer et
// al., Train longer, generalize better, 2017). Own.Schedule is in place of all that.
func (c *Config) LearningRate(step int) float64 {
	if c.Own.Schedule != nil {
		return c.Own.Schedule(step)
	}
	peak := c.LR
	of := c.At(step)
	ratio := float64(of.StepRows()) / float64(c.LRBaseBatch)
	switch strings.ToLower(c.LRScale) {
	case "sqrt":
		peak *= math.Sqrt(ratio)
	case "linear":
		peak *= ratio
	}
	if step < c.Warmup {
		return peak * float64(step+1) / float64(c.Warmup)
	}
	span := max(c.Steps-1-c.Warmup, 1)
	done := math.Min(float64(step-c.Warmup)/float64(span), 1)
	floor := math.Min(c.MinLR, peak)
	// between is exact at both ends.
	between := func(w float64) float64 { return float64(peak*w) + float64(floor*(1-w)) }
	switch strings.ToLower(c.LRSchedule) {
	case "linear":
		return between(1 - done)
	case "cosine":
		return between(0.5 * (1 + math.Cos(math.Pi*done)))
	case "inverse-sqrt":
		w := float64(max(c.Warmup, 1))
		return math.Max(peak*math.Sqrt(w/math.Max(float64(step+1), w)), floor)
	}
	return peak
}
