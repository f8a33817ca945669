// Package launching implements the command launch.
package launching

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/dustin/go-humanize/english"
	"github.com/spf13/cobra"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/host"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/jobs"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/training"
	"github.com/spillway-ml/spillway/launch"
)

// Command returns the command launch.
func Command() *cobra.Command {
	var o launch.Options
	var f launchFlags
	var bind bool
	cmd := &cobra.Command{
		Use:   "launch -n N [flags] -- train|finetune|bench comm [their flags]",
		Short: "Run a job in several processes on this machine",
		Long: `Run a job in several processes on this machine, connected by shared memory. Each has
one rank, or train's --ranks-per-process. Rank 0 prints for all; output of other
ranks is prefixed with their number. A rank that dies or hangs ends the job with
status 3 and a message that names it. With --restarts or --min-ranks the job instead
continues from its newest checkpoint. A divergence always ends it.`,
		Args: cobra.ArbitraryArgs,
	}
	fs := cmd.Flags()
	fs.IntVarP(&o.Ranks, "ranks", "n", 0, "number `N` of processes")
	fs.IntVar(&f.restarts, "restarts", 0, "how often a job that lost a rank restarts from its newest checkpoint, after increasing waits; it stops after two attempts in a row without a newer checkpoint. With --min-ranks: how many lost processes are replaced")
	fs.IntVar(&f.minRanks, "min-ranks", 0, "after a loss continue with the remaining ranks, at least `M`: as many as can share a step (without --reproducible: divide it) and fit. Replacements join at the next checkpoint")
	fs.IntVar(&f.maxRanks, "max-ranks", 0, "with --min-ranks, the most ranks that a job grows to again (default: -n)")
	fs.BoolVar(&bind, "bind", true, "bind each rank to a share of the processors")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := checkLaunch(&o, args, f); err != nil {
			return err
		}
		if args[0] == "finetune" { // choose the flags once, for all processes and attempts
			var err error
			if args, err = training.FinetuneAsTrain(cmd.Context(), args[1:], cmd.ErrOrStderr()); err != nil {
				return err
			}
		}
		self, err := host.Executable()
		if err != nil {
			return fmt.Errorf("launch: %w", err)
		}
		o.Program, o.Args = self, args
		o.Stdout, o.Stderr = cmd.OutOrStdout(), cmd.ErrOrStderr()
		if f, ok := cli.FileOf(o.Stdout); ok {
			o.Stdout = f // rank 0 writes to it directly, without a pipe
		}
		if f, ok := cli.FileOf(o.Stderr); ok {
			o.Stderr = f
		}
		if bind {
			o.CPUs = launch.CPUs()
		}
		return runLaunch(cmd, o, f)
	}
	return cmd
}

// checkLaunch rejects arguments that cannot be launched.
func checkLaunch(o *launch.Options, args []string, f launchFlags) error {
	switch {
	case o.Ranks < 1:
		return fmt.Errorf("launch -n %d: at least 1 rank is needed: spillway launch -n N -- train …", o.Ranks)
	case len(args) == 0 || args[0] != "train" && args[0] != "finetune" && !(len(args) > 1 && args[0] == "bench" && args[1] == "comm"):
		return errors.New("launch runs `train`, `finetune` or `bench comm`: spillway launch -n N -- train [train's flags]")
	case f.restarts < 0:
		return fmt.Errorf("--restarts %d: a number from 0", f.restarts)
	case f.minRanks < 0 || f.maxRanks < 0:
		return fmt.Errorf("--min-ranks %d, --max-ranks %d: numbers of ranks are not negative", f.minRanks, f.maxRanks)
	case f.maxRanks > 0 && f.minRanks == 0:
		return fmt.Errorf("--max-ranks %d is for --min-ranks: a job that goes on with the ranks that are left", f.maxRanks)
	case f.restarts > 0 && args[0] == "bench":
		return errors.New("--restarts is for launch of train and finetune: a job that has checkpoints to go on from")
	}
	return nil
}

// runLaunch runs the job and restarts it from its newest checkpoint if it lost a rank.
func runLaunch(cmd *cobra.Command, o launch.Options, f launchFlags) error {
	signals := make(chan os.Signal, 4)
	cli.Catch(signals, jobSignals...)
	defer signal.Stop(signals)
	defer cli.Shelter()() // until the ranks have ended
	if f.minRanks > 0 {
		e, err := newElastic(o, f)
		if err != nil {
			return err
		}
		return e.run(cmd, signals)
	}
	var tries attempts
	if f.restarts > 0 {
		fs, err := trainValues(o.Args[1:])
		if err != nil {
			return err
		}
		if tries = attemptsFrom(jobs.SavedBy(fs), IdleRestarts); tries.saved.Folder == "" {
			return errors.New("--restarts needs train's --checkpoint: the folder to go on from")
		}
		release, err := tries.saved.Hold()
		if err != nil {
			return err
		}
		defer release()
	}
	args := o.Args
	for {
		g, err := runOnce(cmd, o, signals, nil)
		if err != nil {
			return err
		}
		tellEnd(o.Stderr, g.end)
		switch {
		case g.end.Status == cli.ExitDone:
			return nil
		case !g.end.LostAny() || g.asked || f.restarts == 0:
			return cli.StatusError(g.end.Status)
		}
		if _, err := tries.again(o.Stderr); err != nil {
			return err
		}
		pause := tries.next()
		f.restarts--
		where, _ := tries.saved.From()
		fmt.Fprintf(o.Stderr, "spillway: starting again from %s; %s left; waiting %v\n", where, english.Plural(f.restarts, "restart", ""), pause)
		if err := wait(cmd.Context(), pause); err != nil {
			return err
		}
		if err := tries.saved.Moved(); err != nil {
			fmt.Fprintln(o.Stderr, "spillway: launch:", err)
			return cli.StatusError(launch.LostStatus)
		}
		o.Args = tries.saved.Resuming(args)
	}
}

// withRemedy adds advice to an error of the system: too few files for connecting the processes, or
// too few processes.
func withRemedy(err error) error {
	switch {
	case errors.Is(err, syscall.EMFILE):
		return fmt.Errorf("%w: a process of a job has a file for each of its processes and more: raise ulimit -n", err)
	case errors.Is(err, syscall.EAGAIN):
		return cli.Fault(fmt.Errorf("%w: this user may start no more processes and threads: "+
			"raise ulimit -u, or the limit on pids of the container", err))
	}
	return err
}

// tellEnd prints how the job ended, which the lost processes cannot print.
func tellEnd(w io.Writer, end launch.End) {
	if end.Lost != "" {
		fmt.Fprintln(w, "spillway: launch:", end.Lost)
	}
	if end.Failure != "" && end.Flight != "" {
		after := ""
		if end.Steps > 0 {
			after = fmt.Sprintf(" after step %d", end.Steps)
		}
		fmt.Fprintf(w, "spillway: launch: the job ended%s with: %s\n", after, end.Failure)
	}
	if end.Flight != "" {
		fmt.Fprint(w, "the last operations of each rank:\n", end.Flight)
	}
}
