package train

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
)

// Passes plans what cfg describes and shows the model's program ("model") and the
// program after each pass, in order.
// It reads no weights and no data. That the plan does not fit is no error here.
func Passes(cfg Config, show func(pass string, p *graph.Program)) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	if _, err := chooseRecompute(&cfg, plannedHardware(&cfg).Machine(cfg.Ranks)); err != nil {
		return err
	}
	fwd, conf, _, err := passesOf(&cfg)
	if err != nil {
		return err
	}
	conf.Observe = show
	_, err = plan.Build(fwd, conf)
	return err
}
