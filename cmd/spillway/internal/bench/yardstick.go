package bench

import (
	"context"
	"fmt"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/calibration"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/planner"
)

// yardstick is a small job with a predicted time. It runs before and after each job, since a
// machine that is shared or changes its clock varies in speed from minute to minute.
type yardstick struct {
	job     spillway.Config
	seconds float64 // of a step, predicted
}

// newYardstick predicts the yardstick for a number of ranks on a machine. It writes the model and
// the data to dir.
func newYardstick(ctx context.Context, dir string, ranks int, machine *cost.Machine) (*yardstick, error) {
	c, err := calibration.Yardstick(dir, ranks)
	if err != nil {
		return nil, err
	}
	f, err := planner.Predict(ctx, c, machine)
	if err != nil {
		return nil, err
	}
	return &yardstick{c, f.Step.Seconds}, nil
}

// round runs a job once, with the yardstick, if any, before and after it. The machine's speed is 1
// if the yardstick takes the predicted time, and 2 if it takes half of that.
func (s *session) round(ctx context.Context, j *job, show func(stepLine)) error {
	y := s.yard[j.Ranks]
	if y == nil {
		return s.runOnce(ctx, j, show)
	}
	before, err := s.stepOf(ctx, y.job)
	if err != nil {
		return err
	}
	if err := s.runOnce(ctx, j, show); err != nil {
		return err
	}
	after, err := s.stepOf(ctx, y.job)
	if err != nil {
		return err
	}
	j.Speed = append(j.Speed, 2*y.seconds/(before+after))
	return nil
}

// atSpeed sets AtSpeed.
func (r *Row) atSpeed() {
	var at []float64
	for round, speed := range r.Speed {
		for _, t := range r.Rounds[round] {
			at = append(at, t*speed)
		}
	}
	r.AtSpeed = medianOrNil(at)
}

// launched returns a command over n processes of one rank each.
func (s *session) launched(n int, command ...string) []string {
	return append([]string{s.self, "launch", "-n", fmt.Sprint(n), "--"}, command...)
}

// stepOf runs a job of calibration, and returns the median time of its steps without the first, in
// seconds.
func (s *session) stepOf(ctx context.Context, c spillway.Config) (float64, error) {
	args := s.launched(c.Ranks, "train", "--checkpoint=none", "--metrics=/dev/stdout", "--threads=1",
		"--model="+c.Model, "--data="+c.Data)
	for flag, n := range map[string]int{"batch": c.Batch, "seq": c.Seq, "zero": c.Zero, "steps": c.Steps} {
		args = append(args, fmt.Sprintf("--%s=%d", flag, n))
	}
	o, err := runProgram(ctx, args, nil, func(stepLine) {})
	if err != nil {
		return 0, err
	}
	var walls []float64
	for _, l := range o.steps[1:] {
		walls = append(walls, l.Seconds)
	}
	return quantile(walls, 0.5), nil
}
