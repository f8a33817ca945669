package bench

import (
	"context"
	"fmt"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/calibration"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/planner"
)

// yardstick is a small job with a predicted time of its own. It runs beside each row, since a
// machine that is shared, or changes its clock, is faster in one minute than in the next.
type yardstick struct {
	job     spillway.Config
	seconds float64 // of a step, predicted
}

// yardsticks are by number of ranks.
type yardsticks map[int]*yardstick

// newYardstick predicts the yardstick of so many ranks on a machine. dir gets its model and data.
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

// beside runs something, and returns the machine's speed before and after it: 1 where the
// yardstick takes as long as predicted, 2 where it takes half of that.
func (y *yardstick) beside(ctx context.Context, s *session, run func() error) (speed float64, err error) {
	before, err := s.stepOf(ctx, y.job)
	if err == nil {
		err = run()
	}
	if err != nil {
		return 0, err
	}
	after, err := s.stepOf(ctx, y.job)
	return 2 * y.seconds / (before + after), err
}

// round runs a job once, with the yardstick beside it where there is one.
func (s *session) round(ctx context.Context, j *job, show func(stepLine)) error {
	y := s.yard[j.Ranks]
	if y == nil {
		return s.runOnce(ctx, j, show)
	}
	speed, err := y.beside(ctx, s, func() error { return s.runOnce(ctx, j, show) })
	if err == nil {
		j.Speed = append(j.Speed, speed)
	}
	return err
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

// launched is a command over so many processes of one rank each.
func (s *session) launched(n int, command ...string) []string {
	return append([]string{s.self, "launch", "-n", fmt.Sprint(n), "--"}, command...)
}

// stepOf runs a job of calibration, and returns the median time of its steps but the first, in s.
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
