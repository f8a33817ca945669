package jobs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"

	"github.com/dustin/go-humanize/english"
	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/here"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/internal/nearest"
	"github.com/spillway-ml/spillway/internal/rollcall"
	"github.com/spillway-ml/spillway/launch"
	"github.com/spillway-ml/spillway/plan"
)

// OtherBits is the warning for a job that may continue with fewer ranks.
const OtherBits = "warning: without --reproducible the bits depend on the number of ranks: a job that loses one ends in others"

// survivors lets the processes of a job without a launcher continue after some are lost. Each of
// the remaining ones does the same steps:
//
//	the run ends with an error and frees its GPU memory
//	roll call: rank 0 decides which processes continue, and all read the verdict
//	ncclCommShrink makes the new communicator
//	rank 0 plans for the new number of ranks, and the run resumes from the newest checkpoint
//
// A step that does not end within its time ends the process with status 3.
type survivors struct {
	p     *Place
	flags *pflag.FlagSet
	step  launch.Team // how ranks share a step, and their minimum
	shard int         // the number of ranks must be a multiple of it
	saved OwnCheckpoints
	out   io.Writer
}

// refuseSurvivors rejects a --min-ranks that the job cannot use, in the leading process and before
// it joins the others.
func (p *Place) refuseSurvivors(c *spillway.Config) error {
	switch {
	case p.Min == 0:
		return nil
	case p.Min < 0:
		return fmt.Errorf("--min-ranks %d: at least 1 rank goes on", p.Min)
	case p.Transport != cluster.NCCL:
		return errors.New("--min-ranks of train is for processes with a GPU each that have NCCL alone to meet by (NCCL_COMM_ID=HOST:PORT, and torchrun's, srun's or an indexed Job's variables): " +
			"those of a host go on with spillway launch --min-ranks M -- train …, and under mpirun a lost rank ends the job")
	case c.Checkpoint == "":
		return errors.New("--min-ranks needs --checkpoint: the folder to go on from, which all processes see")
	case p.Min > p.Env.World:
		return fmt.Errorf("--min-ranks %d is over the job's %d processes", p.Min, p.Env.World)
	}
	return nil
}

// SurvivorsOf returns the handler for lost processes of a job with configuration c.
func (p *Place) SurvivorsOf(flags *pflag.FlagSet, c *spillway.Config, out io.Writer) *survivors {
	if p.Min > 0 && !c.Reproducible {
		fmt.Fprintln(out, OtherBits)
	}
	s := &survivors{p: p, flags: flags, step: launch.Team{Leaves: c.LeastLeaves(), Uneven: c.Reproducible, Min: p.Min}, shard: max(c.ShardSize, 1), out: out}
	if p.Min > 0 {
		s.saved = CheckpointsOf(c.Checkpoint, c.Resume)
	}
	return s
}

// Lead runs the job that this process leads, and again with the remaining processes after each
// loss.
func (s *survivors) Lead(ctx context.Context, c spillway.Config, run func(spillway.Config) error) error {
	p := s.p
	for {
		err := run(c)
		if p.Min == 0 {
			return err
		}
		suspect, lost := p.host.Loss()
		if err == nil || ctx.Err() != nil || lost == nil || p.Job.Roll.Folder == "" {
			p.Job.Roll.Close() // no verdict is needed: the others have ended or are ending
			return err
		}
		v, e := p.Job.Roll.Call(ctx, []int{suspect}, s.decide)
		if e != nil {
			p.Job.Roll.Close() // so that no process waits for a verdict
			return cli.Fault(fmt.Errorf("%w; the job does not go on: %w", err, e))
		}
		if !v.On {
			return cli.Fault(fmt.Errorf("%w; %s", err, v.Why))
		}
		where, from := s.saved.From()
		fmt.Fprintf(s.out, "spillway: %s from %s: %s\n", v.Why, where, cli.RunAgain(max(0, p.reached-from)))
		if err = p.rejoin(v); err == nil {
			c, err = s.again(ctx, c)
		}
		if err != nil {
			p.Job.Roll.Close()
			return err
		}
	}
}

// TooFew formats the message of a job that ends because too few of its ranks remain.
func TooFew(t launch.Team) string {
	left := fmt.Sprintf("of the job's ranks there are %d left, ", t.Processes)
	if t.Uneven {
		return left + fmt.Sprintf("fewer than --min-ranks %d", t.Min)
	}
	return left + fmt.Sprintf("which gives no --min-ranks %d that divides a step of %d micro-batches", t.Min, t.Leaves)
}

// decide chooses which of the present processes continue: as many as can share a step.
func (s *survivors) decide(here, lost []int) rollcall.Verdict {
	if len(lost) == 0 {
		return rollcall.Verdict{Why: fmt.Sprintf("all %d processes answer: there is none to go on without", len(here))}
	}
	names := make([]string, len(lost))
	for i, rank := range lost {
		names[i] = fmt.Sprintf("rank %d", rank)
		if at := s.where(rank); at != "" {
			names[i] += " (" + at + ")"
		}
	}
	why := "lost " + english.OxfordWordSeries(names, "and")
	team := s.step
	team.Max, team.Processes = len(here), len(here)
	sizes := slices.DeleteFunc(team.Sizes(), func(n int) bool { return n%s.shard != 0 })
	if len(sizes) == 0 {
		return rollcall.Verdict{Why: why + "; " + TooFew(team)}
	}
	n := sizes[0]
	why += "; going on with " + english.Plural(n, "rank", "")
	if spare := here[n:]; len(spare) > 0 {
		why += fmt.Sprintf(" (%s %v not needed: %s ranks divide the step)", english.PluralWord(len(spare), "rank", ""), spare, nearest.Divisors(team.Leaves, len(here)))
	}
	return rollcall.Verdict{On: true, Go: here[:n], Why: why}
}

// where returns the known location of a lost rank.
func (s *survivors) where(rank int) string {
	if s.p.host == nil {
		return ""
	}
	return s.p.host.Where(rank)
}

// again returns the configuration for the remaining ranks. If the given settings do not fit on
// fewer ranks, it moves state off the device, which keeps the bits.
func (s *survivors) again(ctx context.Context, c spillway.Config) (spillway.Config, error) {
	c = c.Over(s.p.Job)
	c.Resume = c.Resume || s.saved.resumes()
	if c.RankShares = nil; len(c.BatchSchedule) > 0 {
		c.GlobalBatch = 0 // the schedule says the rows of each step
	} else if !c.Reproducible {
		c.Accum = s.step.Leaves / c.Ranks
	} else if c.GlobalBatch == 0 {
		c.GlobalBatch = s.step.Leaves * c.Batch
	}
	c, err := c.FollowGlobalBatch(false)
	if err != nil {
		return c, err
	}
	hw, onDevice, err := spillway.DeviceHardware(c)
	if err != nil {
		return c, err
	}
	_, err = spillway.Build(ctx, onDevice)
	if _, small := errors.AsType[*plan.DoesNotFit](err); !small {
		return c, nil // the run reports other errors
	}
	fmt.Fprintln(s.out, "spillway: as it was asked for the job does not fit over fewer ranks: going on with --fit")
	fixed := options.FixedBy(s.flags)
	fixed.Batch, fixed.Accum, fixed.Precision, fixed.AccumOrder = true, true, true, true
	return c, here.FitTo(ctx, &c, onDevice, fixed, 0, hw, s.out)
}

// rejoin makes this process a member of the group that continues.
func (p *Place) rejoin(v rollcall.Verdict) error {
	_, world := p.host.Place()
	var without []int
	for rank := range world {
		if !slices.Contains(v.Go, rank) {
			without = append(without, rank)
		}
	}
	if err := p.host.Shrink(without); err != nil {
		return cli.Fault(fmt.Errorf("%s, but the remaining ranks do not connect: %w", v.Why, err))
	}
	before := p.Job
	p.Env.Rank, p.Env.World = p.host.Place()
	p.Job = &spillway.Job{Process: p.Env.Rank, Processes: p.Env.World, Locals: before.Locals, Local: before.Local,
		Transport: before.Transport, Outlives: before.Outlives, Roll: before.Roll.Next(), Fastest: before.Fastest, Terms: before.Terms, Asked: before.Asked}
	p.link(p.Job, p.streams())
	return nil
}

// follow handles the end of the run with error ended in a process that does not lead. It returns
// true if the process is to lend its rank again.
func (p *Place) follow(ctx context.Context, ended error) (again bool, err error) {
	_, lost := p.host.Loss()
	if p.Min == 0 || lost == nil || p.Job.Roll.Folder == "" {
		return false, ended
	}
	rank, _ := p.host.Place()
	v, err := p.Job.Roll.Answer(ctx, rank)
	switch {
	case ended == nil && errors.Is(err, fs.ErrNotExist): // the run is over, and one process left late
		return false, nil
	case err != nil:
		return false, cli.Fault(fmt.Errorf("%w; the job does not go on: %w", lost, err))
	case !v.On:
		return false, cli.Fault(fmt.Errorf("%w; %s", lost, v.Why))
	case slices.Contains(v.Lost, rank):
		return false, cli.Fault(fmt.Errorf("%w; the job goes on without this process, rank %d, which has answered too late: %s", lost, rank, v.Why))
	case !slices.Contains(v.Go, rank):
		fmt.Fprintf(p.Stderr, "spillway: rank %d ends: %s\n", rank, v.Why)
		return false, nil
	}
	return true, p.rejoin(v)
}
