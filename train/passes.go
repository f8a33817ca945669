package train

import (
	"context"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
)

// Passes plans what cfg describes and shows the model's program ("model") and the
// program after each pass, in order.
// It reads no weights and no data. That the plan does not fit is no error here.
func Passes(cfg Config, show func(pass string, p *graph.Program)) error {
	_, s, _, err := settled(context.Background(), &cfg)
	if err != nil {
		return err
	}
	at, err := s.Passes()
	if err != nil {
		return err
	}
	at.Observe = show
	_, err = plan.Build(at.Forward, at.Config)
	return err
}
