package spillway

import (
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/plan"
)

// runnable refuses, by name, what can be planned but not run.
func runnable(cfg *Config) error {
	if p := strings.ToLower(cfg.Precision); p != "" && p != "fp32" {
		return fmt.Errorf("--precision %s has no kernels yet: it can be planned (spillway plan), not trained; use fp32", cfg.Precision)
	}
	return nil
}

// Forecast is the plan of a run with its predicted time.
type Forecast struct {
	Config Config // with the model's defaults filled in
	Plan   *plan.Plan
	Step   *cost.Run // of section "step"
	Fits   bool
}

// Predict plans what cfg describes and predicts the time of a step on machine.
// It reads no weights and no data, and needs no device. That the plan does not
// fit is no error here.
func Predict(cfg Config, machine *cost.Machine) (*Forecast, error) {
	return predict(cfg, machine, false)
}

// predict is Predict; with early, a configuration whose lower bound does not fit
// is refused without a plan.
func predict(cfg Config, machine *cost.Machine, early bool) (*Forecast, error) {
	p, _, err := buildPlan(&cfg, early)
	if err != nil {
		return nil, err
	}
	run, err := cost.Simulate(p.Program, "step", machine)
	if err != nil {
		return nil, err
	}
	return &Forecast{Config: cfg, Plan: p, Step: run, Fits: p.Fit() == nil}, nil
}

// Parameters counts the model's parameters, a tied one once.
func (f *Forecast) Parameters() int64 {
	var n int64
	for i := range f.Plan.Program.Params {
		n += f.Plan.Program.Params[i].Elems()
	}
	return n
}

// TokensPerSecond is the predicted speed of all ranks together.
func (f *Forecast) TokensPerSecond() float64 {
	c := &f.Config
	return float64(c.Ranks) * float64(c.Batch) * float64(c.Accum) * float64(c.Seq) / f.Step.Seconds
}
