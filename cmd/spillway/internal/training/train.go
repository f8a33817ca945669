// Package training implements the commands train and finetune.
package training

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"

	"github.com/dustin/go-humanize/english"
	"github.com/spf13/cobra"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/calibration"
	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/ckpt"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/here"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/host"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/jobs"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/planning"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/safetensors"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
	trainer "github.com/spillway-ml/spillway/train"
)

// Command returns the command train.
func Command() *cobra.Command {
	return newCommand(func(*cobra.Command, []string) (func(io.Writer), error) { return func(io.Writer) {}, nil })
}

// newCommand returns train. prepare sets flags that were not given; the function that it returns
// prints them before the run is planned.
func newCommand(prepare func(cmd *cobra.Command, args []string) (func(io.Writer), error)) *cobra.Command {
	var c spillway.Config
	var l options.Later
	cmd := &cobra.Command{
		Use:   "train",
		Short: "Train a model; with no --model, --data or --config: the demo",
		Long: `Train a model, sharded over ranks, within the given memory.

With none of --model, --data and --config it runs the demo: a small byte-level
Llama on the Go files of this machine's Go toolchain, across 4 CPU ranks at
ZeRO-3. Each has less memory than the model's states alone need on one device.
Any flag overrides a value of the demo.`,
		Args: func(cmd *cobra.Command, args []string) error { return jobs.RefuseTogether(cli.NoArguments(cmd, args)) },
	}
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return jobs.RefuseTogether(cli.FlagError(cmd, err)) })
	options.Train(cmd.Flags(), &c, &l)
	fs := cmd.Flags()
	transport := options.JobFlags(fs, &c)
	cmd.RunE = func(cmd *cobra.Command, args []string) (err error) {
		tell, err := prepare(cmd, args)
		if err != nil {
			return jobs.RefuseTogether(err)
		}
		how, device := *transport, c.Device
		var unread error // why the config file could not be read
		if path := fs.Lookup("config").Value.String(); path != "" {
			how, device, unread = options.Meeting(fs, path)
		}
		p, err := jobs.FindPlace(how, device, cmd.ErrOrStderr())
		if err != nil {
			return cmp.Or(unread, err) // the unread config file may set the transport
		}
		p.Min = options.MinRanks(fs)
		ask := &jobs.Asked{Fs: fs, C: &c, L: &l, Ranks: fs.Changed("ranks")}
		err = ask.Settle(p)
		if !p.Leads() {
			return p.Work(cmd.Context(), ask, err)
		}
		if err != nil {
			return p.TurnAway(err)
		}
		if p.Transport != cluster.InProc {
			if err := p.Lead(&c); err != nil {
				return err
			}
			defer func() {
				defer cli.Shelter()() // otherwise a signal could cut off the message about it
				if err != nil && p.Transport == cluster.MPI {
					// Before the other ranks end: Open MPI's launcher kills this process at the first nonzero status.
					cli.PrintError(cmd.ErrOrStderr(), err, os.Args[1:], cmd)
					err = cli.StatusError(cli.ExitStatus(err))
				}
				p.Job.Dismiss(err)
				err = p.End(err)
			}()
		}
		if err := l.Follow(fs, &c, cmd.ErrOrStderr()); err != nil {
			return err
		}
		if p.Job != nil {
			if err := ask.Of(cmd.Context(), p.Job); err != nil {
				return err
			}
		}
		tell(cmd.ErrOrStderr())
		options.TuneDisk(&c, cmd.ErrOrStderr())
		if err := c.Runnable(); err != nil {
			return err
		}
		if l.Fit {
			if err := trainer.Preflight(cmd.Context(), c); err != nil {
				return err
			}
			if err := fit(cmd, &c, p.Transport, l.GlobalBatch); err != nil {
				return err
			}
		}
		return p.SurvivorsOf(fs, &c, cmd.ErrOrStderr()).Lead(cmd.Context(), c, func(c spillway.Config) error {
			measure(&c, p.Env.LocalWorld)
			return train(cmd.Context(), c, ask.Demo, &l, p.Progress, cmd.OutOrStdout(), cmd.ErrOrStderr())
		})
	}
	return cmd
}

// fit sets the open settings of c to those predicted to be fastest, and prints the source of the
// predicted times.
func fit(cmd *cobra.Command, c *spillway.Config, transport string, rows int) error {
	hw, onDevice, err := spillway.DeviceHardware(*c)
	if err != nil {
		return err
	}
	var rates string
	if !strings.EqualFold(c.Device, "cuda") {
		if hw, rates, err = planning.OfRun(here.Machine{}, c, transport); err != nil {
			return err
		}
	}
	if err := here.FitTo(cmd.Context(), c, onDevice, options.FixedBy(cmd.Flags()), rows, hw, cmd.ErrOrStderr()); err != nil {
		return err
	}
	if rates != "" {
		cli.Wrap(cmd.ErrOrStderr(), "  ", "    ", "times are predicted (CPU: "+rates+")")
	}
	return nil
}

// train runs a configured job and prints its progress and result. It calls done with the number of
// completed steps.
func train(ctx context.Context, c spillway.Config, isDemo bool, l *options.Later, done func(step int), stdout, stderr io.Writer) (err error) {
	if isDemo {
		c.Generate = c.Tensor <= 1 && c.Pipeline <= 1 // the sample; tensor and pipeline parallelism do not generate
		if err := options.PrepareDemo(&c); err != nil {
			return err
		}
	}
	var shown atomic.Pointer[progress]
	starting := tellStart(&c, &shown, stderr)
	defer starting.End()
	t, closeAll, err := host.NewTrainer(ctx, c, spillway.New)
	starting.End()
	if errors.Is(err, context.Canceled) {
		return cli.Interrupted("interrupted before the first step")
	}
	if err != nil {
		return err
	}
	leave := cli.Shelter() // until everything is closed
	defer func() {
		err = errors.Join(err, closeAll())
		leave()
	}()
	c = t.Config()
	metrics := &metricsOut{warn: c.Warn}
	if err := metrics.open(t, stderr); err != nil {
		return err
	}
	defer metrics.close()
	if err := l.RoomToExport(); err != nil {
		return err
	}
	describe(stderr, t, metrics.dropped(), isDemo)
	unkept := c.Checkpoint == "" && !l.Unkept
	if unkept {
		fmt.Fprintln(stderr, "warning: the model will not be kept: give --checkpoint DIR to keep it, or --checkpoint none to leave out this warning")
	}
	tellIfDone(stdout, t)
	done(t.Done())
	bar := newProgress(stderr, t.Done(), c.Steps, cli.TokensAreBytes(t, c.EvalData))
	shown.Store(bar)
	stop := sayOnInterrupt(ctx, t, bar)
	still := cli.Beat(bar.beat)
	defer still()
	var losses []float32
	err = t.RunTold(ctx, func(r spillway.StepResult) error {
		if !r.EvalOnly {
			losses = append(losses, r.Loss)
			done(r.Step)
		}
		bar.step(r)
		switch {
		case r.Skipped && r.LossScale != 1:
			bar.note(fmt.Sprintf("step %d overflowed at a loss scale of %g: its update is skipped", r.Step, r.LossScale))
		case r.Skipped:
			bar.note(fmt.Sprintf("warning: step %d is not finite (loss %v, gradient norm %v): its update is skipped", r.Step, r.Loss, r.GradNorm))
		}
		metrics.step(r)
		return nil
	}, bar.evaluating)
	stop()
	still()
	bar.finish()
	if errors.Is(err, context.Canceled) {
		return interruptedAfter(t, c.Checkpoint)
	}
	if err != nil {
		return cli.Fault(err)
	}
	starting.Later("hashing the parameters …")
	sum, err := t.ParamsSHA256()
	starting.End()
	if err != nil {
		return cli.Fault(err)
	}
	metrics.done(t.Done(), sum)
	if err := report(ctx, stdout, t, losses, bar.eval, sum, isDemo); err != nil {
		return err
	}
	if unkept {
		fmt.Fprintln(stderr, "warning: the model was not kept: --checkpoint DIR would have kept it")
	}
	return ckpt.ExportLast(ctx, c.Checkpoint, l.Export, stdout, stderr)
}

// tellStart makes c report the start of its run and its warnings: in the returned progress, or
// above the bar in shown once that is set.
func tellStart(c *spillway.Config, shown *atomic.Pointer[progress], stderr io.Writer) *cli.Progress {
	starting := cli.NewProgress(stderr)
	starting.Says(planningText(c))
	c.Planned = func(*plan.Plan) { starting.Later("starting: memory, ranks and first values …") }
	c.Warn = func(text string) {
		text = "warning: " + cli.Flagged(text)
		if bar := shown.Load(); bar != nil {
			bar.note(text)
			return
		}
		starting.Note(text)
	}
	return starting
}

// tellIfDone prints a message if the run has nothing left to do.
func tellIfDone(w io.Writer, t *spillway.Trainer) {
	c, length := t.Config(), "--steps is"
	if c.Epochs > 0 {
		length = fmt.Sprintf("--epochs %d come to", c.Epochs)
	}
	if t.Done() >= c.Steps && !(t.EvalDue() && c.Evaluates()) {
		fmt.Fprintf(w, "nothing to do: the checkpoint has %d steps and %s %d\n", t.Done(), length, c.Steps)
	}
}

// measure enables the timing of collectives if some output shows it, and sets the peak for shares
// of the peak. On a GPU only --metrics-addr and --tensorboard enable it, as timed operations cannot
// be in CUDA graphs. processes is the number of the job's processes on this machine.
func measure(c *spillway.Config, processes int) {
	c.Measure = c.MetricsAddr != "" || c.TensorBoard != ""
	if !strings.EqualFold(c.Device, "cuda") {
		c.Measure = c.Measure || c.Metrics != ""
		c.PeakFlops = calibration.PeakOf(c.ComputeThreads(), processes)
	}
}

// interruptedAfter returns the error that tells how an interrupted run ended.
func interruptedAfter(t *spillway.Trainer, folder string) error {
	step, where, after := t.Done(), "", ""
	if t.EvalDue() {
		where, after = ", in the evaluation after it", ", which evaluates first"
	}
	switch {
	case step == 0:
	case folder == "":
		where += "; nothing of it is kept, which --checkpoint DIR would do"
	default:
		where += fmt.Sprintf("; the checkpoint in %s has it (go on with --resume%s)", cli.OnOneLine(folder), after)
	}
	return cli.Interrupted(fmt.Sprintf("interrupted after step %d%s", step, where))
}

// sayOnInterrupt makes bar show, if ctx is canceled before stop is called, which step the run saves
// before it ends. The current step may still complete.
func sayOnInterrupt(ctx context.Context, t *spillway.Trainer, bar *progress) (stop func() bool) {
	folder := t.Config().Checkpoint
	size, err := t.CheckpointBytes()
	return context.AfterFunc(ctx, func() {
		if n := bar.done(); folder != "" && err == nil && n > 0 {
			bar.note(fmt.Sprintf("interrupted after step %d: the last complete step is saved in %s (%s), unless it is there already; to quit without saving, interrupt again after %v", n, cli.OnOneLine(folder), plan.Bytes(size), cli.Burst))
		}
	})
}

// planningText describes the work before the start of a run that may take long.
func planningText(c *spillway.Config) string {
	if strings.EqualFold(strings.TrimSpace(c.Recompute), "auto") {
		return "choosing what is computed again, as little as the cap asks for …"
	}
	return "planning; where it does not fit, searching for what would make it fit …"
}

// describe prints, before the first step, what the run trains and how much memory it needs. reached
// is the last step of the previous attempt, or 0 if that is not known.
func describe(w io.Writer, t *spillway.Trainer, reached int, isDemo bool) {
	c, p := t.Config(), t.Plan()
	var params int64
	for i := range p.Program.Tensors() {
		params += p.Program.Params[i].Elems()
	}
	if isDemo {
		fmt.Fprintf(w, "demo: a byte-level Llama on the Go source in %s\n", c.Data)
	}
	if d := t.Device(); d != "" {
		fmt.Fprintln(w, d)
	}
	fmt.Fprintf(w, "model %s: %d parameters; %s at ZeRO-%d; %s tokens a step\n",
		cli.OnOneLine(c.Model), params, english.Plural(c.Ranks, "rank", ""), c.Zero, tokensOfStep(&c))
	line := fmt.Sprintf("memory of a rank: device %s", plan.Bytes(p.Layout.Spaces[graph.Device].Peak))
	if c.DeviceMemory > 0 {
		states := 16 * params // fp32 parameters, gradients and two moments, 4 bytes each
		line += fmt.Sprintf(" of its cap of %s (the model's states alone are %s on one device)", plan.Bytes(c.DeviceMemory), plan.Bytes(states))
	}
	line += ", host " + plan.Bytes(p.Layout.Spaces[graph.Host].Peak)
	if n := p.Config.Staging; n > 0 {
		line += fmt.Sprintf(" and %s to save from beside the steps", plan.Bytes(n))
	}
	if c.FrozenCache.Bytes > 0 && c.FrozenCache.Tier == graph.Host {
		line += fmt.Sprintf(" and %s of --frozen-cache", plan.Bytes(c.FrozenCache.Bytes))
	}
	disk, frozen := p.Layout.Spaces[graph.Disk].Peak, int64(0)
	if c.FrozenCache.Tier == graph.Disk {
		frozen = c.FrozenCache.Bytes
	}
	if disk+frozen > 0 {
		line += ", disk " + plan.Bytes(disk)
		if frozen > 0 {
			line += fmt.Sprintf(" and %s of --frozen-cache", plan.Bytes(frozen))
		}
	}
	fmt.Fprintln(w, line)
	for _, note := range cli.FlaggedAll(t.Notes()) {
		fmt.Fprintln(w, note)
	}
	if auto := t.RecomputeAuto(); auto != "" {
		fmt.Fprintf(w, "recompute auto: %s\n", cli.Flagged(auto))
	}
	if c.Resume && t.Done() > 0 {
		fmt.Fprintf(w, "resumed after step %d from %s%s\n", t.Done(), cli.OnOneLine(c.Checkpoint), lost(t, reached))
		if c.Init != "" && !strings.EqualFold(c.Init, "random") {
			fmt.Fprintf(w, "the weights are those of the checkpoint; --init %s is not read\n", cli.OnOneLine(c.Init))
		}
	} else if c.Resume {
		fmt.Fprintf(w, "no checkpoint in %s yet: starting from step 1\n", cli.OnOneLine(c.Checkpoint))
	}
	if !trains(p) {
		fmt.Fprintln(w, "warning: --freeze leaves nothing to train; the steps only measure the loss")
	}
	if c.Init == "random" && !c.Resume && hasWeights(c.Model) {
		fmt.Fprintf(w, "weights start random; --init %s loads the ones in the model's folder\n", cli.OnOneLine(c.Model))
	}
}

// tokensOfStep formats the tokens of a step; with a schedule, the fewest and the most.
func tokensOfStep(c *spillway.Config) string {
	if all := c.BatchSchedule.Until(c.Steps).Distinct(); len(all) > 1 {
		return fmt.Sprintf("%d to %d", all[len(all)-1]*c.Seq, all[0]*c.Seq)
	}
	of := c.At(0)
	return fmt.Sprint(of.StepRows() * c.Seq)
}

// lost describes the losses of a resumed run: the steps that the previous attempt had done since
// the checkpoint, and a changed number of ranks. launch prints the same when it restarts a job;
// here a scheduler or a person did.
func lost(t *spillway.Trainer, reached int) (text string) {
	if n := min(reached, t.Config().Steps) - t.Done(); n > 0 {
		text = ": " + cli.RunAgain(n)
	}
	if was, now := t.SavedRanks(), t.Config().Ranks; was > 0 && was != now {
		text += fmt.Sprintf(", over %s in place of %d", english.Plural(now, "rank", ""), was)
	}
	return text
}

// trains reports whether any parameter is trainable.
func trains(p *plan.Plan) bool {
	for i := range p.Program.Tensors() {
		if !p.Program.Params[i].Frozen {
			return true
		}
	}
	return false
}

// lastLoss formats the mean training loss of the last steps, at most 10. It leaves out the first
// step, before which nothing was learned.
func lastLoss(losses []float32, bytes bool) string {
	last := losses[max(min(1, len(losses)-1), len(losses)-10):]
	mean := 0.0
	for _, v := range last {
		mean += float64(v) / float64(len(last))
	}
	what := "at the last"
	if len(last) > 1 {
		what = fmt.Sprintf("mean of the last %d", len(last))
	}
	return fmt.Sprintf("%s %s", cli.LossText(float32(mean), bytes), what)
}

// report prints the results of the run.
func report(ctx context.Context, w io.Writer, t *spillway.Trainer, losses []float32, eval *spillway.EvalResult, sum string, isDemo bool) error {
	c := t.Config()
	if len(losses) > 0 {
		fmt.Fprintf(w, "training loss: %.4f at the first step, %s\n", losses[0], lastLoss(losses, cli.TokensAreBytes(t, c.Data)))
	}
	if eval != nil {
		fmt.Fprintf(w, "%s, after step %d\n", evalText(eval, cli.TokensAreBytes(t, c.EvalData)), eval.Step)
	}
	if n := t.Skipped(); n > 0 {
		fmt.Fprintf(w, "skipped: the updates of %d of %d steps, whose gradients were not finite\n", n, t.Done())
	}
	fmt.Fprintf(w, "parameters' SHA-256: %s\n", sum)
	if isDemo && c.Generate {
		const prompt = "func "
		text, err := t.Generate(ctx, prompt, 300, spillway.Sampling{Temperature: options.DemoTemperature, TopK: 40, Seed: uint64(c.Seed)})
		switch {
		case errors.Is(err, context.Canceled):
			return cli.Interrupted("interrupted after training, while the sample was made; the checkpoint is whole")
		case err != nil:
			return cli.Fault(err)
		}
		if cli.IsTerminal(w) {
			text = cli.Visible(text)
		}
		fmt.Fprintf(w, "\nsample, continuing %q:\n%s\n\n", prompt, text)
	}
	if c.Checkpoint != "" {
		fmt.Fprintf(w, "checkpoint: %s\n", cli.OnOneLine(c.Checkpoint))
	}
	if r := t.Receipt(); r != nil {
		fmt.Fprintf(w, "receipt: %s, %s in %.2f s, the last of SHA-256 %s\n", cli.OnOneLine(c.Receipt), english.Plural(r.Lines, "line", ""), r.Seconds, r.Head)
	}
	return nil
}

// hasWeights reports whether a model is a folder with weights or checkpoints. A preset's name means
// the preset, even if a folder of checkpoints has the same name: see planner.ModelConfig.
func hasWeights(name string) bool {
	if _, err := model.LookupPreset(name); err == nil {
		if _, err := os.Stat(filepath.Join(name, model.ConfigFile)); err != nil {
			return false
		}
	}
	m, err := planner.OpenModel(context.Background(), name, model.ConfigFile)
	if err != nil {
		return false
	}
	if m.Saved() != nil {
		return m.Close() == nil
	}
	return safetensors.WeightsOf(name) != ""
}
