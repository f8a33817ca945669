// Package planning implements the command plan. Command turns its flags into a configuration, plans
// it, and passes the result, a planReport, to the writers in text.go, page.go, json.go and emit.go.
package planning

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/spf13/cobra"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/host"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
)

// hiddenFlags are the flags of train that the help of plan leaves out.
var hiddenFlags = []string{
	"checkpoint", "collectives", "cuda-graphs", "data", "data-glob", "epochs", "eval-every", "eval-split",
	"eval-steps", "export", "init", "keep", "long", "loss-on", "metrics", "metrics-addr", "order", "receipt",
	"receipt-every", "require-pinned", "resume", "save-every", "seed", "template", "tensorboard", "text-field",
	"timeout", "tokenizer", "trace",
}

// Command returns the command plan. here is the machine that it runs on, nil for none. page, if not
// nil, receives each plan's page as --html writes it.
func Command(here Here, page func([]byte) error) *cobra.Command {
	var c config.Config
	var l options.Later
	f := Flags{here: here, page: page}
	cmd := &cobra.Command{
		Use:   "plan",
		Short: "Compute the exact memory of a run and predict its step time, before it starts",
		Long: `Plan a run without running it. For each ZeRO stage it prints a rank's device
memory, host memory, disk space and communication, the predicted step time, and
whether the plan fits. Then it lists the largest buffers at the peak and, if the
request does not fit, changes that would make it fit. It accepts train's flags,
and needs no weights, no data and no GPU.`,
		Args: cli.NoArguments,
	}
	fs := cmd.Flags()
	options.Train(fs, &c, &l)
	f.Bind(fs, &c)
	cli.Hide(fs, hiddenFlags...)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		defer host.PlanHeap.Acquire()()
		out := cmd.OutOrStdout()
		f.progress = cli.NewProgress(cmd.ErrOrStderr())
		defer f.progress.End()
		if err := f.refuseMachine(fs); err != nil {
			return err
		}
		if done, err := f.withoutJob(cmd, &c); done {
			return err
		}
		if f.from != "" {
			if err := f.readFrom(fs, f.from); err != nil {
				return err
			}
		} else if path := fs.Lookup("config").Value.String(); path != "" {
			if err := cli.ApplyConfigFile(fs, path); err != nil {
				return err
			}
		}
		if err := cmp.Or(options.RefuseUnderOne(fs), l.Refuse(), cli.RefuseOverwriting(fs)); err != nil {
			return err
		}
		f.keep(fs)
		question, err := f.topicOf(fs, &c)
		if err != nil {
			return err
		}
		if err := cmp.Or(f.validateReference(), f.Settle(fs, &c)); err != nil {
			return err
		}
		if err := f.checkEmit(fs, &c); err != nil {
			return err
		}
		l.Fit = l.Fit || f.emit != ""
		if err := c.Validate(); err != nil {
			return err
		}
		if err := l.Follow(fs, &c, io.Discard); err != nil {
			return err
		}
		f.openRows = l.OpenRows(fs)
		if err := cmp.Or(f.outputs(), f.lookAround(cmd.Context(), fs, &c, cmd.ErrOrStderr())); err != nil {
			return err
		}
		c = c.Sharing()
		var best *planner.Fitted
		if question != nil {
			if c, best, err = f.answerTo(cmd.Context(), question, c, options.FixedBy(fs), l.GlobalBatch); err != nil {
				return err
			}
			takeFitted(&c, best)
			f.chosen = true
			return runPlan(cmd.Context(), c, &f, best, out)
		}
		if l.Fit {
			f.progress.Says("searching for the fastest configuration that fits …")
			best, err = f.request(c).Fit(cmd.Context(), options.FixedBy(fs), l.GlobalBatch, f.Hardware(&c))
			var none *planner.NothingFits
			switch {
			case errors.As(err, &none):
				return f.nothingFits(cmd.Context(), c, none, l.GlobalBatch, out)
			case err != nil:
				return err
			}
			takeFitted(&c, best)
		}
		f.chosen = l.Fit
		return runPlan(cmd.Context(), c, &f, best, out)
	}
	return cmd
}

// withoutJob runs the modes that need no job: the lists, and --calibrate alone.
func (f *Flags) withoutJob(cmd *cobra.Command, c *config.Config) (done bool, err error) {
	switch out := cmd.OutOrStdout(); {
	case f.listModels:
		return true, listModels(out)
	case f.listGPUs:
		return true, listGPUs(out)
	case f.calibrate && !slices.ContainsFunc([]string{"model", "config", "from", "ask", "gpu"}, cmd.Flags().Changed):
		return true, f.onlyCalibrate(cmd.Context(), c, out)
	}
	return false, nil
}

// outputs rejects files that cannot be written, before the search begins. Existing files are kept
// until there is a plan.
func (f *Flags) outputs() error {
	if err := checkDump(f.dump); f.dump != "" && err != nil {
		return err
	}
	if f.htmlPath == "-" {
		return errors.New("--html -: the page goes to a file, not to stdout; give its name")
	}
	return cmp.Or(cli.CheckOutput("json", f.jsonPath), cli.CheckOutput("html", f.htmlPath))
}

// nothingFits reports the configuration as requested, and refuses it with the results of the
// search. The request itself is the answer if it fits and the effort was used up before another
// plan. With a global batch, the request is reported with the split that came nearest.
func (f *Flags) nothingFits(ctx context.Context, c config.Config, none *planner.NothingFits, globalBatch int,
	out io.Writer) error {
	if globalBatch > 0 && none.Smallest != nil {
		c.Batch, c.Accum = none.Smallest.Config.Batch, none.Smallest.Config.Accum
	}
	f.hopeless = true
	err := runPlan(ctx, c, f, nil, out)
	if _, refused := errors.AsType[*plan.DoesNotFit](err); refused || err == nil && none.Smallest != nil {
		return none
	}
	return err
}

// runPlan plans all stages, reports them, and refuses a request that does not fit.
func runPlan(ctx context.Context, c config.Config, f *Flags, best *planner.Fitted, stdout io.Writer) error {
	hw := f.Hardware(&c)
	f.progress.Says("planning …")
	stages, err := f.forecastStages(ctx, c, hw)
	if err != nil {
		return err
	}
	if f.dump != "" {
		if err := dumpPasses(ctx, f.request(stages[c.Zero].Config), f.dump); err != nil {
			return err
		}
	}
	asked := stages[c.Zero]
	r := planReport{flags: f, stages: stages, asked: asked, best: best}
	if r.order, err = asked.OrderCost(ctx, hw.Machine(c.Ranks)); err != nil {
		return err
	}
	chosen := best != nil || f.hopeless
	text := f.jsonPath != "-" && f.emit == ""
	if !asked.Fits {
		f.progress.Says("it does not fit; searching for what would make it fit …")
		r.ways, r.noWay = planner.WaysOut(ctx, asked, hw)
		if r.noWay == nil {
			if r.ways, r.noWay, err = f.asCommanded(ctx, r.ways, hw); err != nil {
				return err
			}
		}
	}
	if !chosen {
		r.recommend(ctx, c, hw)
	}
	if err := ctx.Err(); err != nil {
		return err // canceled: the search is incomplete
	}
	f.progress.End()
	if text {
		if f.answer != nil {
			f.answer.print(stdout)
		}
		if err := r.print(stdout); err != nil {
			return err
		}
	}
	if a, _ := r.answer(); f.emit != "" && asked.Fits {
		if err := r.writeJob(stdout, a); err != nil {
			return err
		}
	}
	if f.jsonPath != "" {
		if err := cli.WriteJSON(stdout, f.jsonPath, r.doc()); err != nil {
			return err
		}
	}
	if err := r.writePage(); err != nil {
		return fmt.Errorf("--html: %w", err)
	}
	return asked.Plan.Fit()
}

// forecastStages plans a configuration at stages 0 to 3, two at a time: a plan of thousands of
// layers needs much memory. On one rank all stages are the same. A pipeline has stages 0 and 1.
func (f *Flags) forecastStages(ctx context.Context, c config.Config, hw planner.Hardware) ([]*planner.Forecast, error) {
	n := 4
	if c.Pipelined() && c.Zero < 2 { // a pipeline rejects the others
		n = 2
	}
	stages := make([]*planner.Forecast, n)
	if c.Ranks == 1 {
		one, err := f.request(c).Predict(ctx, hw.Machine(1))
		if err != nil {
			return nil, err
		}
		for z := range stages {
			at := *one
			at.Config.Zero, stages[z] = z, &at
		}
		stages[c.Zero] = one
		return stages, nil
	}
	errs := make([]error, n)
	var wg sync.WaitGroup
	slots := make(chan struct{}, 2)
	for z := range stages {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			one := c
			one.Zero = z
			stages[z], errs[z] = f.request(one).Predict(ctx, hw.Machine(one.Ranks))
		})
	}
	wg.Wait()
	if errs[c.Zero] != nil {
		return nil, errs[c.Zero]
	}
	return stages, errors.Join(errs...)
}
