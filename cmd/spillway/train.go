package main

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
	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/safetensors"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/platform"
)

func trainCommand() *cobra.Command {
	var c spillway.Config
	var l later
	cmd := &cobra.Command{
		Use:   "train",
		Short: "Train a model; with no --model, --data or --config: the demo",
		Long: `Train a model, sharded over ranks, within the memory that it is given.

With none of --model, --data and --config it runs the demo: a small byte-level
GPT on the Go files of this machine's Go toolchain, across 4 CPU ranks at
ZeRO-3, each with less memory than the model's states alone need on one device.
Any flag overrides a value of the demo.`,
		Args: func(cmd *cobra.Command, args []string) error { return refuseTogether(noArguments(cmd, args)) },
	}
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return refuseTogether(flagError(cmd, err)) })
	trainFlags(cmd.Flags(), &c, &l)
	fs := cmd.Flags()
	transport := jobFlags(fs, &c)
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		how, device := *transport, c.Device
		var unread error // of the config file
		if path := fs.Lookup("config").Value.String(); path != "" {
			how, device, unread = meeting(fs, path)
		}
		p, err := findPlace(how, device, cmd.ErrOrStderr())
		if err != nil {
			return cmp.Or(unread, err) // where the ranks meet may stand in what is not read
		}
		p.min = minRanks(fs)
		ask := &asked{fs: fs, c: &c, l: &l, ranks: fs.Changed("ranks")}
		err = ask.settle(p)
		if !p.leads() {
			return p.work(ask, err)
		}
		if err != nil {
			return p.turnAway(err)
		}
		if p.transport != cluster.InProc {
			if err := p.lead(&c); err != nil {
				return err
			}
			defer func() {
				defer shelter()() // or a signal would cut off what is said of its effect
				if err != nil && p.transport == cluster.MPI {
					// Before the others end: Open MPI's launcher kills this process at the first status that is not 0.
					printError(cmd.ErrOrStderr(), err, os.Args[1:], cmd)
					err = &statusError{exitStatus(err)}
				}
				p.job.Dismiss(err)
				err = p.end(err)
			}()
		}
		if err := l.follow(fs, &c, cmd.ErrOrStderr()); err != nil {
			return err
		}
		if p.job != nil {
			if err := ask.of(cmd.Context(), p.job); err != nil {
				return err
			}
		}
		tuneDisk(&c, cmd.ErrOrStderr())
		if err := c.Runnable(); err != nil {
			return err
		}
		if l.fit {
			if err := p.fit(cmd, &c, l.globalBatch); err != nil {
				return err
			}
		}
		return p.survivorsOf(fs, &c, cmd.ErrOrStderr()).lead(cmd.Context(), c, func(c spillway.Config) error {
			return train(cmd.Context(), c, ask.demo, &l, p.progress, cmd.OutOrStdout(), cmd.ErrOrStderr())
		})
	}
	return cmd
}

// jobFlags binds the flags about a job's processes, and returns --transport's value.
func jobFlags(fs *pflag.FlagSet, c *spillway.Config) (transport *string) {
	fs.IntVar(&c.ShardSize, "shard-size", 0, "shard over groups of `N` ranks and replicate over the groups (HSDP; in bf16 and fp16 with last bits of its own; default: shard over all)")
	fs.IntVar(&c.LocalRanks, "ranks-per-process", 0, "ranks that each process runs; --ranks is then all of them, and may be left out (default: 1 in a job over processes)")
	transport = fs.String("transport", cluster.Auto, "how ranks meet: auto, inproc (one process), shm (spillway launch), mpi (mpirun) or nccl (--device cuda over processes)")
	fs.Int("min-ranks", 0, "where processes are lost go on with those that are left, down to `M`: for jobs over NCCL alone (NCCL_COMM_ID), from --checkpoint; NCCL 2.27 or later (others: launch --min-ranks)")
	return transport
}

// fit completes c with what is predicted to be fastest, and says what the times are from.
func (p *place) fit(cmd *cobra.Command, c *spillway.Config, rows int) error {
	hw, onDevice, err := spillway.DeviceHardware(*c)
	if err != nil {
		return err
	}
	var rates string
	if !strings.EqualFold(c.Device, "cuda") {
		f := planFlags{transport: p.transport}
		f.cpu, f.rates = knownHardware(c.ComputeThreads())
		if err := f.overTransport(c.Ranks); err != nil {
			return err
		}
		hw, rates = f.cpu, f.rates
	}
	if err := fitTo(cmd.Context(), c, onDevice, fixedBy(cmd.Flags()), rows, hw, cmd.ErrOrStderr()); err != nil {
		return err
	}
	if rates != "" {
		wrap(cmd.ErrOrStderr(), "  ", "    ", "times are predicted (CPU: "+rates+")")
	}
	return nil
}

// meeting is how and on what device ranks are to meet by the flags and the config file,
// which is read as a whole later: what is wrong with it is rank 0's to tell, where ranks
// meet.
func meeting(fs *pflag.FlagSet, path string) (transport, device string, err error) {
	both := trainCommand().Flags()
	for _, name := range []string{"transport", "device"} {
		if f := fs.Lookup(name); f.Changed {
			_ = both.Set(name, f.Value.String()) // a word, which any text is
		}
	}
	err = applyConfigFile(both, path)
	return both.Lookup("transport").Value.String(), both.Lookup("device").Value.String(), err
}

// fixedBy are the choices that a command line has made, which --fit leaves as they are.
func fixedBy(fs *pflag.FlagSet) spillway.Fixed {
	return spillway.Fixed{Zero: fs.Changed("zero"), Prefetch: fs.Changed("prefetch"), Batch: fs.Changed("batch"), Accum: fs.Changed("accum"),
		AccumOrder: fs.Changed("accum-order"), Precision: fs.Changed("precision"), Recompute: fs.Changed("recompute"), Offload: fs.Changed("offload")}
}

// settleRanks refuses a --ranks-per-process that can't be, and makes it the number of
// ranks of a process that is alone.
func settleRanks(c *spillway.Config, total, perProcess bool, p *place) error {
	switch {
	case !perProcess:
		return nil
	case c.LocalRanks < 1 || c.LocalRanks > platform.MaxLocalRanks:
		return fmt.Errorf("--ranks-per-process %d: 1 to %d", c.LocalRanks, platform.MaxLocalRanks)
	case p.transport != cluster.InProc: // see place.lead
	case total && c.Ranks != c.LocalRanks:
		return fmt.Errorf("--ranks %d with --ranks-per-process %d: one process runs all ranks here; spillway launch -n N starts several", c.Ranks, c.LocalRanks)
	default:
		c.Ranks, c.LocalRanks = c.LocalRanks, 0
	}
	return nil
}

func noArguments(cmd *cobra.Command, args []string) error {
	switch {
	case len(args) == 0:
		return nil
	case cmd.HasSubCommands():
		return unknownCommand(cmd, args[0])
	}
	return fmt.Errorf(`argument "%s" is not understood; every value goes with its --flag`, cut(args[0]))
}

// settle applies the config file or the demo's values below the flags, and
// refuses what is not built.
func settle(fs *pflag.FlagSet, c *spillway.Config, l *later) (isDemo bool, err error) {
	isDemo = !fs.Changed("model") && !fs.Changed("data") && !fs.Changed("config")
	demoGlob := isDemo && !fs.Changed("data-glob")
	defer func() {
		if !demoGlob { // the demo's own pattern is for Go's source alone
			c.EvalGlob = c.DataGlob
		}
	}()
	if isDemo {
		if !fs.Changed("checkpoint") { // a folder of the user's own is not replaced
			c.CheckpointMark = demoMark
		}
		if err := applyDemo(fs); err != nil {
			return true, err
		}
	}
	if path := fs.Lookup("config").Value.String(); path != "" {
		if err := applyConfigFile(fs, path); err != nil {
			return false, err
		}
	}
	if err := cmp.Or(refuseUnderOne(fs), l.refuse()); err != nil {
		return isDemo, err
	}
	return isDemo, cmp.Or(c.Validate(), checkAddress(c.MetricsAddr), refuseOverwriting(fs), l.refuseExport(c), l.refuseAllow(c))
}

// train runs a configured job and tells a person about it, and done how many steps it
// has done.
func train(ctx context.Context, c spillway.Config, isDemo bool, l *later, done func(step int), stdout, stderr io.Writer) (err error) {
	if isDemo {
		c.Generate = true
		if err := prepareDemo(&c); err != nil {
			return err
		}
	}
	c.Measure = c.MetricsAddr != "" || c.TensorBoard != ""
	var shown atomic.Pointer[progress]
	planned := newLiveLine(stderr).telling(planningText(&c))
	defer planned()
	c.Planned = func(*plan.Plan) { planned() }
	c.Warn = func(text string) {
		planned()
		text = flagged(text)
		if bar := shown.Load(); bar != nil {
			bar.note("warning: " + text)
			return
		}
		fmt.Fprintln(stderr, "warning:", text)
	}
	t, closeAll, err := newTrainer(ctx, c, spillway.New)
	if errors.Is(err, context.Canceled) {
		return &interrupted{"interrupted before the first step"}
	}
	if err != nil {
		return err
	}
	leave := shelter() // until all is given back
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
	if err := l.roomToExport(); err != nil {
		return err
	}
	describe(stderr, t, metrics.dropped(), isDemo)
	unkept := c.Checkpoint == "" && !l.unkept
	if unkept {
		fmt.Fprintln(stderr, "warning: the model will not be kept: give --checkpoint DIR to keep it, or --checkpoint none to leave out this warning")
	}
	if t.Done() >= c.Steps {
		fmt.Fprintf(stdout, "nothing to do: the checkpoint has %d steps and --steps is %d\n", t.Done(), c.Steps)
	}
	done(t.Done())
	bar := newProgress(stderr, t.Done(), c.Steps, tokensAreBytes(t, c.EvalData))
	shown.Store(bar)
	stop := sayOnInterrupt(ctx, t, bar)
	var losses []float32
	err = t.Run(ctx, func(r spillway.StepResult) error {
		losses = append(losses, r.Loss)
		done(r.Step)
		bar.step(r)
		switch {
		case r.Skipped && r.LossScale != 1:
			bar.note(fmt.Sprintf("step %d overflowed at a loss scale of %g: its update is skipped", r.Step, r.LossScale))
		case r.Skipped:
			bar.note(fmt.Sprintf("warning: step %d is not finite (loss %v, gradient norm %v): its update is skipped", r.Step, r.Loss, r.GradNorm))
		}
		metrics.step(r)
		return nil
	})
	stop()
	bar.finish()
	if errors.Is(err, context.Canceled) {
		return interruptedAfter(t.Done(), c.Checkpoint)
	}
	if err != nil {
		return fault(err)
	}
	sum, err := t.ParamsSHA256()
	if err != nil {
		return fault(err)
	}
	metrics.done(t.Done(), sum)
	if err := report(ctx, stdout, t, losses, bar.eval, sum, isDemo); err != nil {
		return err
	}
	if unkept {
		fmt.Fprintln(stderr, "warning: the model was not kept: --checkpoint DIR would have kept it")
	}
	return l.exportLast(ctx, &c, stdout, stderr)
}

// interruptedAfter says how an interrupted run ended.
func interruptedAfter(step int, folder string) error {
	where := ""
	switch {
	case step == 0:
	case folder == "":
		where = "; nothing of it is kept, which --checkpoint DIR would do"
	default:
		where = fmt.Sprintf("; the checkpoint in %s has it (go on with --resume)", onOneLine(folder))
	}
	return &interrupted{fmt.Sprintf("interrupted after step %d%s", step, where)}
}

// sayOnInterrupt has bar say, when ctx is canceled before stop is called, what the run saves
// before it ends. The step that runs may still come to its end.
func sayOnInterrupt(ctx context.Context, t *spillway.Trainer, bar *progress) (stop func() bool) {
	folder := t.Config().Checkpoint
	size, err := t.CheckpointBytes()
	return context.AfterFunc(ctx, func() {
		if n := bar.done(); folder != "" && err == nil && n > 0 {
			bar.note(fmt.Sprintf("interrupted after step %d: the last complete step is saved in %s (%s), unless it is there already; to quit without saving, interrupt again after %v", n, onOneLine(folder), plan.Bytes(size), burst))
		}
	})
}

// planningText says what may take long before a run stands.
func planningText(c *spillway.Config) string {
	if strings.EqualFold(strings.TrimSpace(c.Recompute), "auto") {
		return "choosing what is computed again, as little as the cap asks for …"
	}
	return "planning; where it does not fit, searching for what would make it fit …"
}

// tokensAreBytes says whether a token of the run's data at path is a byte of text.
func tokensAreBytes(t *spillway.Trainer, path string) bool {
	return t.ByteTokens() && !strings.HasSuffix(path, ".bin")
}

// describe says before the first step what will run and what it takes. reached is the
// last step of the attempt before this one, as far as is known: 0 otherwise.
func describe(w io.Writer, t *spillway.Trainer, reached int, isDemo bool) {
	c, p := t.Config(), t.Plan()
	var params int64
	for i := range p.Program.Params {
		params += p.Program.Params[i].Elems()
	}
	if isDemo {
		fmt.Fprintf(w, "demo: a byte-level GPT on the Go source in %s\n", c.Data)
	}
	if d := t.Device(); d != "" {
		fmt.Fprintln(w, d)
	}
	fmt.Fprintf(w, "model %s: %d parameters; %s at ZeRO-%d; %d tokens a step\n", c.Model, params, english.Plural(c.Ranks, "rank", ""), c.Zero, c.Ranks*c.Batch*c.Accum*c.Seq)
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
	for _, note := range flaggedAll(t.Notes()) {
		fmt.Fprintln(w, note)
	}
	if auto := t.RecomputeAuto(); auto != "" {
		fmt.Fprintf(w, "recompute auto: %s\n", flagged(auto))
	}
	if c.Resume && t.Done() > 0 {
		fmt.Fprintf(w, "resumed after step %d from %s%s\n", t.Done(), onOneLine(c.Checkpoint), lost(t, reached))
	} else if c.Resume {
		fmt.Fprintf(w, "no checkpoint in %s yet: starting from step 1\n", onOneLine(c.Checkpoint))
	}
	if !trains(p) {
		fmt.Fprintln(w, "warning: --freeze leaves nothing to train; the steps only measure the loss")
	}
	if c.Init == "random" && !c.Resume && hasWeights(c.Model) {
		fmt.Fprintf(w, "weights start random; --init %s loads the ones in the model's folder\n", onOneLine(c.Model))
	}
}

// lost says what a run that goes on has lost: the steps that the attempt before it had
// done since the checkpoint, and ranks, of which there may also be more now. It is what
// launch says where it goes on by itself; here a scheduler or a person started the run.
func lost(t *spillway.Trainer, reached int) (text string) {
	if n := min(reached, t.Config().Steps) - t.Done(); n > 0 {
		text = ": " + runAgain(n)
	}
	if was, now := t.SavedRanks(), t.Config().Ranks; was > 0 && was != now {
		text += fmt.Sprintf(", over %s in place of %d", english.Plural(now, "rank", ""), was)
	}
	return text
}

// runAgain says how many steps a job does once more.
func runAgain(n int) string {
	if n == 1 {
		return "1 step is run again"
	}
	return fmt.Sprintf("%d steps are run again", n)
}

// trains says whether any parameter is trainable.
func trains(p *plan.Plan) bool {
	for i := range p.Program.Params {
		if !p.Program.Params[i].Frozen {
			return true
		}
	}
	return false
}

// lastLoss is the mean training loss of the last steps, without the first, which
// knows nothing.
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
	return fmt.Sprintf("%s %s", lossText(float32(mean), bytes), what)
}

// report tells how the run ended.
func report(ctx context.Context, w io.Writer, t *spillway.Trainer, losses []float32, eval *spillway.EvalResult, sum string, isDemo bool) error {
	c := t.Config()
	if len(losses) > 0 {
		fmt.Fprintf(w, "training loss: %.4f at the first step, %s\n", losses[0], lastLoss(losses, tokensAreBytes(t, c.Data)))
	}
	if eval != nil {
		fmt.Fprintf(w, "%s, after step %d\n", evalText(eval, tokensAreBytes(t, c.EvalData)), eval.Step)
	}
	if n := t.Skipped(); n > 0 {
		fmt.Fprintf(w, "skipped: the updates of %d of %d steps, whose gradients were not finite\n", n, t.Done())
	}
	fmt.Fprintf(w, "parameters' SHA-256: %s\n", sum)
	if isDemo {
		const prompt = "func "
		text, err := t.Generate(ctx, prompt, 300, spillway.Sampling{Temperature: demoTemperature, TopK: 40, Seed: uint64(c.Seed)})
		switch {
		case errors.Is(err, context.Canceled):
			return &interrupted{"interrupted after training, while the sample was made; the checkpoint is whole"}
		case err != nil:
			return fault(err)
		}
		if isTerminal(w) {
			text = visible(text)
		}
		fmt.Fprintf(w, "\nsample, continuing %q:\n%s\n\n", prompt, text)
	}
	if c.Checkpoint != "" {
		fmt.Fprintf(w, "checkpoint: %s\n", onOneLine(c.Checkpoint))
	}
	return nil
}

// hasWeights tells whether a folder holds a model's weights, or checkpoints.
func hasWeights(name string) bool {
	m, err := planner.OpenModel(context.Background(), name, model.ConfigFile)
	if err != nil {
		return false
	}
	if m.Saved() != nil {
		return m.Close() == nil
	}
	_, err = os.Stat(filepath.Join(name, safetensors.FileName))
	return err == nil
}
