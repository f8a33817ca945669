package training

import (
	"fmt"
	"math"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/tfevents"
)

// boardFile is a run's event file for TensorBoard; nil: there is none.
type boardFile struct{ w *tfevents.Writer }

func openBoard(dir string, done int) (*boardFile, error) {
	w, err := tfevents.Create(dir, int64(done))
	if err != nil {
		return nil, fmt.Errorf("--tensorboard: %w", err)
	}
	return &boardFile{w}, nil
}

func (b *boardFile) step(r spillway.StepResult) error {
	var list []tfevents.Scalar
	if !r.EvalOnly {
		list = scalars(r)
	}
	if r.Eval != nil {
		list = append(list, tfevents.Scalar{Tag: "eval/loss", Value: float64(r.Eval.Loss)})
	}
	if err := b.w.Scalars(int64(r.Step), list...); err != nil {
		return fmt.Errorf("--tensorboard: %w", err)
	}
	return nil
}

// scalars returns the scalars of a training step.
func scalars(r spillway.StepResult) []tfevents.Scalar {
	list := []tfevents.Scalar{
		{Tag: "train/loss", Value: float64(r.Loss)}, {Tag: "train/learning_rate", Value: r.LR}, {Tag: "train/gradient_norm", Value: r.GradNorm},
		{Tag: "train/loss_scale", Value: r.LossScale}, {Tag: "train/skipped_steps", Value: float64(r.SkippedAll)},
		{Tag: "speed/tokens_per_second", Value: r.TokensPerS}, {Tag: "speed/step_seconds", Value: r.Seconds},
	}
	if !math.IsNaN(r.Noise.Scale) {
		list = append(list, tfevents.Scalar{Tag: "train/noise_scale", Value: r.Noise.Scale})
	}
	for sp := range graph.NumSpaces {
		if planned := most(r.Planned[sp]); planned > 0 {
			list = append(list, tfevents.Scalar{Tag: fmt.Sprintf("memory/%s_peak_bytes", sp), Value: float64(most(r.Peak[sp]))},
				tfevents.Scalar{Tag: fmt.Sprintf("memory/%s_planned_bytes", sp), Value: float64(planned)})
		}
	}
	for _, c := range r.Comm {
		if c.Calls > 0 {
			list = append(list, tfevents.Scalar{Tag: "comm/" + c.Op + "_seconds", Value: c.Seconds},
				tfevents.Scalar{Tag: "comm/" + c.Op + "_bytes_per_second", Value: float64(c.Bytes) / c.Seconds})
		}
	}
	if !math.IsNaN(r.Overlap) {
		list = append(list, tfevents.Scalar{Tag: "comm/overlap_share", Value: r.Overlap})
	}
	return list
}

func (b *boardFile) close() error {
	if b == nil {
		return nil
	}
	if err := b.w.Close(); err != nil {
		return fmt.Errorf("--tensorboard: %w", err)
	}
	return nil
}

func most(list []int64) (n int64) {
	for _, v := range list {
		n = max(n, v)
	}
	return n
}
