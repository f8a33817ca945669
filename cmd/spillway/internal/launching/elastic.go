package launching

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/dustin/go-humanize/english"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/jobs"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/launch"
)

// launchFlags are the flags of launch that are not in launch.Options.
type launchFlags struct {
	restarts           int
	minRanks, maxRanks int // 0: a job that lost a rank restarts with all ranks
}

// elastic runs a job that continues after losing ranks: the remaining ranks form a new group and
// resume from the newest checkpoint.
type elastic struct {
	o       launch.Options
	team    launch.Team
	args    []string        // of the command, as given
	step    spillway.Config // the step that the ranks share
	tries   attempts
	steps   int  // --steps, after which no ranks join; math.MaxInt with --epochs
	fit     bool // --fit was given, or is added because nothing fits without it
	reached int  // the highest step that any attempt completed
	out     io.Writer
}

// newElastic reads the job's flags about a step and the checkpoints.
func newElastic(o launch.Options, f launchFlags) (*elastic, error) {
	if o.Args[0] != "train" {
		return nil, errors.New("--min-ranks is for launch of train and finetune: a job that has checkpoints to go on from")
	}
	fs, err := trainValues(o.Args[1:])
	if err != nil {
		return nil, err
	}
	number := func(name string) int { n, _ := fs.GetInt(name); return n }
	e := &elastic{o: o, args: o.Args, steps: number("steps"), out: o.Stderr}
	if fs.Changed("epochs") {
		e.steps = math.MaxInt
	}
	e.fit, _ = fs.GetBool("fit")
	c := spillway.Default()
	c.Batch, c.Accum, c.GlobalBatch, c.Ranks, c.RankShares = number("batch"), number("accum"), number("global-batch"), o.Ranks, cli.CountsOf(fs.Lookup("rank-shares").Value)
	c.Reproducible, _ = fs.GetBool("reproducible")
	if c.BatchSchedule, err = config.ParseBatchSchedule(cmp.Or(fs.Lookup("batch-schedule").Value.String(), "none")); err != nil {
		return nil, err
	}
	switch {
	case fs.Lookup("checkpoint").Value.String() == "":
		return nil, errors.New("--min-ranks needs train's --checkpoint: the folder to go on from")
	case fs.Changed("ranks-per-process"):
		return nil, errors.New("--min-ranks with --ranks-per-process: a job that loses ranks has a process for each; leave one of them out")
	case number("tensor") > 1:
		return nil, errors.New("--min-ranks with --tensor: going on without a rank of a group that shares layers is not built; " +
			"leave one of them out")
	case number("pipeline") > 1:
		return nil, errors.New("--min-ranks with --pipeline: going on without a rank of a stage is not built; leave one of them out")
	case f.minRanks > o.Ranks:
		return nil, fmt.Errorf("--min-ranks %d is over the %d of -n", f.minRanks, o.Ranks)
	case f.maxRanks > o.Ranks:
		return nil, fmt.Errorf("--max-ranks %d is over the %d of -n: launch starts no more processes than it has lost", f.maxRanks, o.Ranks)
	case f.maxRanks > 0 && f.maxRanks < f.minRanks:
		return nil, fmt.Errorf("--max-ranks %d is under --min-ranks %d", f.maxRanks, f.minRanks)
	case c.Batch < 1:
		return nil, fmt.Errorf("--batch %d: at least 1 row is needed", c.Batch)
	case c.GlobalBatch < 0:
		return nil, fmt.Errorf("--global-batch %d: at least 1 row is needed", c.GlobalBatch)
	}
	if e.step, err = c.FollowGlobalBatch(false); err != nil {
		return nil, err
	}
	if !c.Reproducible {
		fmt.Fprintln(e.out, jobs.OtherBits)
	}
	e.tries = attemptsFrom(jobs.SavedBy(fs), o.Ranks+1) // losing every rank in turn is not yet a sign of a fault
	e.team = launch.Team{Leaves: e.step.LeastLeaves(), Uneven: c.Reproducible, Min: f.minRanks, Max: cmp.Or(f.maxRanks, o.Ranks), Restarts: f.restarts, Processes: o.Ranks}
	return e, nil
}

// trainValues parses train's arguments as train does, with the config file or the demo's values for
// flags that were not given.
func trainValues(args []string) (*pflag.FlagSet, error) {
	fs := options.TrainSet()
	if err := fs.Parse(args); err != nil {
		return nil, cli.PlainFlagError(err)
	}
	if !fs.Changed("model") && !fs.Changed("data") && !fs.Changed("config") {
		return fs, options.ApplyDemo(fs)
	}
	if path := fs.Lookup("config").Value.String(); path != "" {
		return fs, cli.ApplyConfigFile(fs, path)
	}
	return fs, nil
}

// run runs the job, and again after each change of its ranks.
func (e *elastic) run(cmd *cobra.Command, signals <-chan os.Signal) error {
	release, err := e.tries.saved.Hold()
	if err != nil {
		return err
	}
	defer release()
	first := true
	for {
		sizes := e.team.Sizes()
		if first {
			sizes = []int{e.o.Ranks}
		} else if err := e.tries.saved.Moved(); err != nil {
			fmt.Fprintln(e.out, "spillway: launch:", err)
			return cli.StatusError(launch.LostStatus)
		}
		g, err := e.form(cmd, sizes, first, signals)
		if err != nil {
			return err
		}
		first = false
		switch end := g.end; {
		case end.Status == cli.ExitDone:
			return nil
		case end.LostAny() && !g.asked:
			if err := e.lose(g); err != nil {
				return err
			}
			if idle, err := e.tries.again(e.out); err != nil {
				return err
			} else if idle {
				if err := wait(cmd.Context(), e.tries.next()); err != nil {
					return err
				}
			}
		case g.joins && end.Status == cli.ExitInterrupted && !g.asked:
			e.team.Join()
			where, _ := e.tries.saved.From()
			fmt.Fprintf(e.out, "spillway: launch: going on with %s from %s\n", english.Plural(e.team.Sizes()[0], "rank", ""), where)
		default:
			tellEnd(e.out, end)
			return cli.StatusError(end.Status)
		}
	}
}

// lose records the losses of a generation and prints how the job continues.
func (e *elastic) lose(g generation) error {
	e.team.Lose(max(1, g.end.LostRanks))
	what := cmp.Or(g.end.Lost, g.end.Failure)
	sizes := e.team.Sizes()
	if len(sizes) == 0 {
		tellEnd(e.out, g.end)
		fmt.Fprintf(e.out, "spillway: launch: lost %s; %s\n", what, jobs.TooFew(e.team))
		return cli.StatusError(launch.LostStatus)
	}
	where, from := e.tries.saved.From()
	e.reached = max(e.reached, g.end.Steps)
	joining := ""
	if e.team.Joining > 0 {
		joining = fmt.Sprintf("; %d more from the next checkpoint on", e.team.Joining)
	}
	fmt.Fprintf(e.out, "spillway: launch: lost %s; going on with %s from %s: %s%s\n", what, english.Plural(sizes[0], "rank", ""), where, cli.RunAgain(max(0, e.reached-from)), joining)
	return nil
}

// shared returns the flags with which ranks share the step: with all ranks the given shares,
// otherwise shares that differ by at most one.
func (e *elastic) shared(ranks int) []string {
	leaves := e.team.Leaves
	if len(e.step.BatchSchedule) > 0 {
		return nil // the schedule gives the rows of each step
	}
	if !e.team.Uneven {
		return []string{"--accum", strconv.Itoa(leaves / ranks)}
	}
	accum, shares := (leaves+ranks-1)/ranks, "even"
	if ranks == e.o.Ranks && e.step.RankShares != nil {
		accum, shares = e.step.Accum, cli.Counts(&e.step.RankShares).String()
	}
	return []string{"--accum", strconv.Itoa(accum), "--global-batch", strconv.Itoa(e.step.StepRows()), "--rank-shares", shares}
}

// form runs the job with the first of sizes that fits. If none fits with the given flags, it adds
// --fit, which moves state off the device and keeps the bits.
func (e *elastic) form(cmd *cobra.Command, sizes []int, first bool, signals <-chan os.Signal) (g generation, err error) {
	for {
		for _, n := range sizes {
			o := e.o
			o.Ranks, o.Args = n, cli.WithFlags(e.args, e.shared(n))
			if !first {
				o.Args = e.tries.saved.Resuming(o.Args)
			}
			if e.fit && !slices.Contains(o.Args, "--fit") {
				o.Args = append(o.Args, "--fit")
			}
			if g, err = e.generation(cmd, o, signals); err != nil || first || g.end.Status != cli.ExitDoesNotFit {
				return g, err
			}
		}
		if e.fit {
			return g, nil
		}
		e.fit = true
		fmt.Fprintln(e.out, "spillway: launch: as it was asked for the job does not fit over fewer ranks: going on with --fit")
	}
}

// generation runs the job once. If more ranks can join, it signals the job to end after its next
// checkpoint.
func (e *elastic) generation(cmd *cobra.Command, o launch.Options, signals <-chan os.Signal) (g generation, err error) {
	if !e.team.Grows(o.Ranks) {
		return runOnce(cmd, o, signals, nil)
	}
	before := e.tries.saved.Names()
	return runOnce(cmd, o, signals, func(stop <-chan struct{}) bool {
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return false
			case <-tick.C:
			}
			if !e.tries.saved.Grew(before) {
				continue
			}
			if done, _ := e.tries.saved.Newest(); done < e.steps {
				return true
			}
		}
	})
}
