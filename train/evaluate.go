package train

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/run"
)

// Evaluate returns the mean loss over EvalSteps batches of the held-out data, or over all of
// its targets if these batches would hold more rows.
func (t *Trainer) Evaluate(ctx context.Context) (EvalResult, error) {
	return t.EvaluateTold(ctx, nil)
}

// EvaluateTold is Evaluate that reports progress. After each batch it calls tell with the number of
// batches done and the mean loss so far. With Config.Inference the batches are all of the data, and
// every target counts once.
func (t *Trainer) EvaluateTold(ctx context.Context, tell func(done, of int, loss float64)) (EvalResult, error) {
	if t.fatal != nil {
		return EvalResult{}, t.fatal
	}
	if t.eval == nil {
		return EvalResult{}, config.RefuseField("EvalData", "evaluate: the run has no Config.EvalData")
	}
	began := time.Now()
	if err := t.flush(); err != nil {
		return EvalResult{}, err
	}
	var sum, rights float64
	var count int64
	for k := range t.eval.steps {
		if err := ctx.Err(); err != nil {
			return EvalResult{}, err
		}
		counted, err := t.eval.countTargets(k)
		if err != nil {
			return EvalResult{}, err
		}
		n := counted.All
		err = t.ranks.Each("the evaluation", func(r *run.Rank) error {
			return r.Exec.RunSection(graph.SectionEval.String(), func(ph *graph.Phase, repeat int) error {
				if ph.Kind != graph.MicroPhase {
					return nil
				}
				return t.fill(r, t.eval, t.hyper(t.at.Step, 0, max(n, 1)), k, ph.Round+repeat, 0)
			})
		})
		if err != nil {
			t.fatal = fmt.Errorf("evaluation: %w", err)
			return EvalResult{}, t.fatal
		}
		loss, right, err := t.hostLoss()
		if err != nil {
			return EvalResult{}, err
		}
		sum += loss
		rights += right
		count += n
		if tell != nil {
			tell(k+1, t.eval.steps, sum/float64(max(count, 1)))
		}
	}
	return EvalResult{Step: t.at.Step, Loss: float32(sum / float64(count)), Accuracy: rights / float64(count), Targets: count, Seconds: time.Since(began).Seconds()}, nil
}

// hostLoss returns the sum of losses, and the number of targets that are the class of the largest
// logit. That number is NaN if the program does not count them.
func (t *Trainer) hostLoss() (sum, right float64, err error) {
	v, err := t.ranks.First().Exec.HostF64(t.ports[graph.PortLoss])
	if err != nil {
		return 0, 0, err
	}
	if !t.plan.Program.CountsClasses() {
		return v[0], math.NaN(), nil
	}
	return v[0], v[1], nil
}
