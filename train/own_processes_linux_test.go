package train

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/launch"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/run"
	"github.com/spillway-ml/spillway/train/job"
)

// memberVar makes the test binary run as a process of a launched job that defines a model.
const memberVar = "SPILLWAY_TEST_MEMBER"

// member is the main function of such a process: it joins the job, and leads it or lends its ranks.
func member() (err error) {
	env, err := cluster.Read(os.Getenv)
	if err != nil {
		return err
	}
	memory, streams, err := launch.Inherited(env)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, memory.Close()) }()
	c := ownConfig(twoPaths())
	c.Own.Rule, c.Zero = &descent, 3
	j := &job.Job{Process: env.Rank, Processes: env.World, Locals: env.LocalWorld, Local: env.LocalRank, Transport: oneHost{memory}, Own: c.Own}
	for i, s := range streams {
		peer := 0
		if env.Rank == 0 {
			peer = i + 1
		}
		j.Links = append(j.Links, run.NewLink(peer, s))
	}
	if j.Process > 0 {
		if os.Getenv(memberVar) == "other" {
			j.Own.Model = config.NewModel("another", model.Config{Family: model.MLP, Inputs: squareSide * squareSide, Classes: 4})
		}
		_, err := Work(context.Background(), j, nil)
		return err
	}
	c.Config = c.Config.Over(j)
	text, err := told(c)
	j.Dismiss(err)
	if err == nil {
		_, err = fmt.Print(text)
	}
	return err
}

// told runs c and returns its losses, held-out losses and the hash of its parameters as text.
func told(c request) (text string, err error) {
	tr, err := c.start(context.Background())
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, tr.Close()) }()
	err = tr.Run(context.Background(), func(r StepResult) error {
		text += fmt.Sprintf("%d: %v at %g, %v right", r.Step, r.Loss, r.LR, r.Accuracy)
		if r.Eval != nil {
			text += fmt.Sprintf(" held out %v of %d, %v right", r.Eval.Loss, r.Eval.Targets, r.Eval.Accuracy)
		}
		text += "\n"
		return nil
	})
	if err != nil {
		return "", err
	}
	sum, err := tr.ParamsSHA256()
	return text + sum, err
}

func init() {
	if os.Getenv(memberVar) != "" {
		asMember = member
	}
}

// TestOwnModelOverLaunchedProcesses runs a program with its own model, operation and update rule
// over launched processes. The results must be those of one process. A process with another model
// is refused, and the error names the field.
func TestOwnModelOverLaunchedProcesses(t *testing.T) {
	launched := func(how string) (launch.End, string, string) {
		t.Setenv(memberVar, how)
		var out, errs bytes.Buffer
		end, err := launch.Run(t.Context(), launch.Options{Ranks: 2, Program: os.Args[0], Stdout: &out, Stderr: &errs}, nil)
		require.NoError(t, err)
		return end, out.String(), errs.String()
	}
	c := ownConfig(twoPaths())
	c.Own.Rule, c.Zero = &descent, 3
	end, out, errs := launched("same")
	require.Zero(t, end.Status, errs)
	require.Equal(t, ran(t, c), out)

	end, _, errs = launched("other")
	require.NotZero(t, end.Status)
	require.Contains(t, errs, `Job.Own.Model is "another" in this process`)
}

// encoder returns a model of the units "enc" and "dec", neither of which is repeated.
func encoder() *config.Model {
	return &config.Model{Name: "encoder", Forward: func(b *graph.Builder, rows, _ int, _ bool) error {
		n := int64(rows)
		x := b.Reshape("flat", b.Input("x", n, squareSide, squareSide, 1), n, squareSide*squareSide)
		dense := func(name string, x graph.Value, in, out int64) graph.Value {
			w := b.Param(name+".weight", graph.Normal(0.2), out, in)
			return b.Linear(name, x, w, b.Param(name+".bias", graph.Zeros, out), graph.LinearAttr{TransW: true})
		}
		b.Unit("enc")
		x = b.Apply(clamp, "enc.clamp", nil, dense("enc.in", x, squareSide*squareSide, 512))[0]
		x = b.Apply(clamp, "enc.out", nil, dense("enc.mid", x, 512, 512))[0]
		b.Unit("dec")
		x = b.Apply(clamp, "dec.clamp", nil, dense("dec.in", x, 512, 256))[0]
		b.CrossEntropy("loss", dense("dec.out", x, 256, 4), b.Targets(n, 1))
		return b.Err()
	}}
}

// TestFitOfAnOwnModel searches with a program's own model and a memory cap below its need. The
// search must find a configuration that fits, and the run must give the same losses.
func TestFitOfAnOwnModel(t *testing.T) {
	c := ownConfig(encoder())
	c.Own.Eval, c.EvalEvery, c.Zero, c.Accum, c.Batch, c.Steps = nil, 0, 0, 1, 16, 3
	free := ran(t, c)
	p, err := c.planned().Plan(t.Context())
	require.NoError(t, err)
	capped := c
	capped.DeviceMemory = p.Layout.Spaces[graph.Device].Peak * 2 / 3
	_, err = capped.planned().Plan(t.Context())
	require.ErrorIs(t, err, ErrDoesNotFit)
	best, err := capped.planned().Fit(t.Context(), planner.Fixed{Zero: true}, 0, briefly(2))
	require.NoError(t, err)
	require.True(t, best.Fits)
	require.NotEmpty(t, best.Config.Offload+best.Config.Recompute)
	c.Config = best.Config
	require.Equal(t, free, ran(t, c), "%v", best.Choices)
}
