package bench

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/dustin/go-humanize/english"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/data"
)

// zeroBench holds the arguments of bench zero.
type zeroBench struct {
	out            outputs
	rounds, warmup int
	calibrate      bool
	vary           []string
	peer           string
	made           []string // the command
}

// benchSteps is the default number of steps of a round.
const benchSteps = 22

func zeroCommand() *cobra.Command {
	var c spillway.Config
	var l options.Later
	var b zeroBench
	cmd := &cobra.Command{
		Use:   "zero",
		Short: "Every ZeRO stage with the same model, data and seed: memory, time, communication, loss",
		Long: `Train with every ZeRO stage, with the same model, data and seed, and compare memory,
time, communication and losses. Without --model, --data and --config it trains the demo's
model, in at most three minutes on two cores.

Each round runs every configuration once, each in a separate process. The order alternates
between forwards and backwards, so that changes of the machine affect all equally. The first
steps of a round do not count.`,
		Args: cli.NoArguments,
	}
	fs := cmd.Flags()
	options.Train(fs, &c, &l)
	b.out.flags(fs)
	roundFlags(fs, &b.rounds, &b.warmup, &b.calibrate)
	fs.Var(cli.List(&b.vary, "LIST"), "vary", "also run stage 3 with other settings, one at a time: offload, recompute, precision, ranks (with the same rows a step), accum-order, separated by commas; each alone or with a value, as in recompute=full")
	fs.StringVar(&b.peer, "peer", "", "torch: also run the job with PyTorch, by python3: DDP, ZeroRedundancyOptimizer, and FSDP2 if that PyTorch has it (GPT-2 only)")
	for _, f := range ofOneRun {
		fs.Lookup(f.flag).Hidden = true
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		b.made = given(cmd)
		args, err := trainArgs(fs, &c, &l, func(fs *pflag.FlagSet) error { return refuseOfOneRun(fs, "bench zero runs every stage", ofOneRun) })
		_, unknown := varied(b.vary, &c)
		if unknown == nil && b.peer != "" && !strings.EqualFold(b.peer, "torch") {
			unknown = fmt.Errorf("--peer %.80q: want torch", b.peer)
		}
		if err := cmp.Or(err, checkRounds(b.rounds, b.warmup, &c), unknown, b.out.check(false)); err != nil {
			return err
		}
		return b.run(cmd, args)
	}
	return cmd
}

// roundFlags binds the flags that control the rounds.
func roundFlags(fs *pflag.FlagSet, rounds, warmup *int, calibrate *bool) {
	fs.IntVar(rounds, "rounds", 5, "number of runs of every configuration")
	fs.IntVar(warmup, "warmup-steps", 2, "number of first steps of a round that do not count")
	fs.BoolVar(calibrate, "calibrate", true, "measure this CPU for predicted times unless plan --calibrate has done so: about 10 s, once")
	fs.Lookup("steps").Usage = "steps of a round"
	fs.Lookup("steps").DefValue = fmt.Sprint(benchSteps)
}

func checkRounds(rounds, warmup int, c *spillway.Config) error {
	switch {
	case rounds < 1:
		return fmt.Errorf("--rounds %d: at least 1 is needed", rounds)
	case warmup < 0:
		return fmt.Errorf("--warmup-steps %d: a number from 0", warmup)
	case warmup >= c.Steps:
		return fmt.Errorf("--warmup-steps %d of --steps %d: at least one step has to count; give more steps", warmup, c.Steps)
	}
	return nil
}

// refusedFlag is a flag that applies to a single run only.
type refusedFlag struct{ flag, why string }

var ofOneRun = []refusedFlag{
	{"zero", "; leave it out"},
	{"fit", ", and --fit chooses one; leave it out"},
	{"metrics", " and writes no lines of steps; leave it out (--json has a row a stage)"},
	{"receipt", " and writes none; leave it out"},
	{"receipt-every", " and writes no receipt; leave it out"},
	{"metrics-addr", " and serves no metrics of steps; leave it out (--json has a row a stage)"},
	{"tensorboard", " and writes no curves; leave it out (--json has a row a stage)"},
	{"trace", " and traces none of them; leave it out (train has it)"},
	{"checkpoint", " and keeps none of them; leave it out"},
	{"async-save", " and keeps none of them; leave it out"},
	{"accept-changes", ", each from its first step; leave it out"},
	{"allow", " in one precision; leave it out"},
	{"export", " and keeps none of them; leave it out"},
	{"resume", ", each from its first step; leave it out"},
	{"save-every", " and keeps none of them; leave it out"},
	{"keep", " and keeps none of them; leave it out"},
}

func refuseOfOneRun(fs *pflag.FlagSet, what string, list []refusedFlag) error {
	for _, f := range list {
		if fs.Changed(f.flag) {
			return fmt.Errorf("--%s: %s%s", f.flag, what, f.why)
		}
	}
	return nil
}

// trainArgs returns the flags of train that all rows share: those that were given, or the demo's
// without --device-memory and --checkpoint. refuse is called before and after reading the config
// file, to reject flags that a benchmark does not have.
func trainArgs(fs *pflag.FlagSet, c *spillway.Config, l *options.Later, refuse func(*pflag.FlagSet) error) (args []string, err error) {
	if err := refuse(fs); err != nil {
		return nil, err
	}
	own := options.TrainSet()
	isDemo := !fs.Changed("model") && !fs.Changed("data") && !fs.Changed("config")
	capped := fs.Changed("device-memory")
	if !fs.Changed("steps") {
		if err := fs.Set("steps", fmt.Sprint(benchSteps)); err != nil {
			return nil, err
		}
	}
	_, wrong := options.Settle(fs, c, l)
	if !isDemo { // check the config file's keys too
		wrong = cmp.Or(refuse(fs), wrong)
	}
	if wrong != nil {
		return nil, wrong
	}
	if c.Data == "" && !isDemo {
		return nil, config.ErrNoData
	}
	if !isDemo {
		if err := data.Readable(c.Data); err != nil {
			return nil, fmt.Errorf("--data: %w", err)
		}
	}
	fs.Visit(func(f *pflag.Flag) {
		switch {
		case own.Lookup(f.Name) == nil, f.Name == "config", isDemo && slices.Contains([]string{"checkpoint", "keep", "zero"}, f.Name), isDemo && !capped && f.Name == "device-memory":
		default:
			args = append(args, "--"+f.Name+"="+f.Value.String())
		}
	})
	if isDemo {
		root, err := options.Goroot()
		if err != nil {
			return nil, err
		}
		args = append(args, "--data="+filepath.Join(root, "src"))
	}
	return args, nil
}

func (b *zeroBench) run(cmd *cobra.Command, args []string) error {
	ctx, s := cmd.Context(), &session{progress: cmd.ErrOrStderr(), rounds: b.rounds, warmup: b.warmup}
	if err := s.prepare(ctx, args, b.calibrate); err != nil {
		return err
	}
	for z := range 4 {
		name := fmt.Sprintf("ZeRO-%d", z)
		err := s.add(ctx, name, "", append(slices.Clone(args), fmt.Sprintf("--zero=%d", z)))
		if z == 0 && errors.Is(err, spillway.ErrConfig) { // the error applies to every stage
			return err
		}
		if err != nil {
			return fmt.Errorf("stage %d: %w", z, err)
		}
	}
	if err := s.addVaried(ctx, args, b.vary); err != nil {
		return err
	}
	if b.peer != "" {
		dir, err := os.MkdirTemp("", "spillway-bench-")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		if err := s.addPeer(ctx, args, dir); err != nil {
			return err
		}
	}
	if err := s.measure(ctx); err != nil {
		return err
	}
	notes, apart := s.peerNotes()
	if over := s.overPeak(); over != "" {
		notes = append(notes, over)
	}
	c, err := configOf(args)
	if err != nil {
		return err
	}
	what := fmt.Sprintf("model %s, %s, micro-batch %d × %d tokens, accumulation %d", cli.OnOneLine(c.Model),
		english.Plural(c.Ranks, "rank", ""), c.Batch, s.rows()[0].Seq, c.Accum)
	err = b.out.write(cmd, &report{title: "ZeRO stages", what: what, session: s, tables: zeroTables, charts: zeroCharts, capacity: c.DeviceMemory, made: b.made, notes: notes})
	return cmp.Or(err, cli.Fault(apart))
}

// given returns the command as it was typed, before the demo's values are filled in.
func given(cmd *cobra.Command) (words []string) {
	words = strings.Fields(cmd.CommandPath())
	cmd.Flags().Visit(func(f *pflag.Flag) { words = append(words, "--"+f.Name+"="+f.Value.String()) })
	return words
}

// overPeak explains shares of the peak above 100 %; "": there are none.
func (s *session) overPeak() string {
	var over []string
	why := "The peak is of fp32 products, and 16-bit ones can be faster."
	for _, r := range s.rows() {
		if r.FlopsShare != nil && *r.FlopsShare > 1 {
			over = append(over, r.Name)
			if r.Precision == "fp32" {
				why = "The peak was measured too low, as when other programs run. Run again when nothing else runs."
			}
		}
	}
	if len(over) == 0 {
		return ""
	}
	return "Over 100 % of peak: " + strings.Join(over, ", ") + ". " + why
}
