package config

import (
	"fmt"
	"math"
	"strings"
)

// LearningRate returns the rate of a step (from 0): linear warm-up over Warmup steps, then the
// schedule. A decaying schedule reaches MinLR at the last step. The peak is LR, scaled with the
// step's rows as LRScale says (linear: Goyal et al., Accurate, Large Minibatch SGD, 2017; sqrt:
// Hoffer et al., Train longer, generalize better, 2017); MinLR is not scaled. Own.Schedule
// replaces all of this.
func (c *Config) LearningRate(step int) float64 {
	if c.Own.Schedule != nil {
		return c.Own.Schedule(step)
	}
	of := c.At(step)
	peak := c.peakRate(of.StepRows())
	if step < c.Warmup {
		return peak * float64(step+1) / float64(c.Warmup)
	}
	span := max(c.Steps-1-c.Warmup, 1)
	done := math.Min(float64(step-c.Warmup)/float64(span), 1)
	floor := c.MinLR
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

// peakRate is LR scaled by LRScale for a step of the given rows.
func (c *Config) peakRate(rows int) float64 {
	ratio := float64(rows) / float64(c.LRBaseBatch)
	switch strings.ToLower(c.LRScale) {
	case "sqrt":
		return c.LR * math.Sqrt(ratio)
	case "linear":
		return c.LR * ratio
	}
	return c.LR
}

// scalesRate tells whether LRScale changes LR.
func (c *Config) scalesRate() bool {
	return c.Own.Schedule == nil && !c.Inference && !strings.EqualFold(c.LRScale, "none")
}

// rowsOfSteps lists the different numbers of rows of steps, largest first.
func (c *Config) rowsOfSteps() []int {
	if len(c.BatchSchedule) > 0 {
		return c.BatchSchedule.Distinct()
	}
	return []int{c.StepRows()}
}

// RefuseFloor refuses a MinLR above a scaled peak rate, which could not fall to it.
func (c *Config) RefuseFloor() error {
	if !c.scalesRate() {
		return nil
	}
	for _, rows := range c.rowsOfSteps() {
		if peak := c.peakRate(rows); c.MinLR > peak {
			return Refuse("Config.MinLR %v is above the rate of a step of %d rows, %.4g by Config.LRScale %s and Config.LRBaseBatch %d: it is what the rate falls to, and is not scaled; give a smaller one", c.MinLR, rows, peak, c.LRScale, c.LRBaseBatch)
		}
	}
	return nil
}

// RateNote returns a note about how LR is scaled; none if it is not.
func (c *Config) RateNote() []string {
	if !c.scalesRate() {
		return nil
	}
	var of []string
	for _, rows := range c.rowsOfSteps() {
		of = append(of, fmt.Sprintf("%.4g for %d rows", c.peakRate(rows), rows))
	}
	return []string{fmt.Sprintf("learning rate by Config.LRScale %s: Config.LR %g holds at %d rows (Config.LRBaseBatch), so it is %s", strings.ToLower(c.LRScale), c.LR, c.LRBaseBatch, strings.Join(of, ", "))}
}
