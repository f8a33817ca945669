package main

import (
	"cmp"
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
	"github.com/spillway-ml/spillway/internal/nearest"
	"github.com/spillway-ml/spillway/internal/rollcall"
	"github.com/spillway-ml/spillway/launch"
	"github.com/spillway-ml/spillway/plan"
)

// otherBits warns of a job that may go on with another number of ranks.
const otherBits = "warning: without --reproducible the bits depend on the number of ranks: a job that loses one ends in others"

// survivors is how the processes of a job that nobody restarts go on without those that are
// lost. Each of them, in the same order:
//
//	the run ends with the loss, and gives back what it has of its GPU
//	the roll is called: rank 0 decides who goes on, and all read it
//	ncclCommShrink makes the communicator of those
//	rank 0 plans for as many, and the run goes on from the newest checkpoint
//
// Whatever does not come to its end within its time ends the process with status 3.
type survivors struct {
	p      *place
	flags  *pflag.FlagSet
	leaves int // micro-batches of a step over all ranks: the step stays the same
	shard  int // ranks that the world is a multiple of
	saved  ownCheckpoints
	out    io.Writer
}

// refuseSurvivors refuses a --min-ranks of the process that leads where the job has no use for
// it, before it meets the others.
func (p *place) refuseSurvivors(c *spillway.Config) error {
	switch {
	case p.min == 0:
		return nil
	case p.min < 0:
		return fmt.Errorf("--min-ranks %d: at least 1 rank goes on", p.min)
	case p.transport != cluster.NCCL:
		return errors.New("--min-ranks of train is for processes with a GPU each that have NCCL alone to meet by (NCCL_COMM_ID=HOST:PORT, and torchrun's, srun's or an indexed Job's variables): " +
			"those of a host go on with spillway launch --min-ranks M -- train …, and under mpirun a lost rank ends the job")
	case c.Checkpoint == "":
		return errors.New("--min-ranks needs --checkpoint: the folder to go on from, which all processes see")
	case p.min > p.env.World:
		return fmt.Errorf("--min-ranks %d is over the job's %d processes", p.min, p.env.World)
	}
	return nil
}

// survivorsOf is how the job of a configuration goes on.
func (p *place) survivorsOf(flags *pflag.FlagSet, c *spillway.Config, out io.Writer) *survivors {
	if p.min > 0 && !c.Reproducible {
		fmt.Fprintln(out, otherBits)
	}
	s := &survivors{p: p, flags: flags, leaves: c.Ranks * c.Accum, shard: max(c.ShardSize, 1), out: out}
	if p.min > 0 {
		s.saved = checkpointsOf(c.Checkpoint, c.Resume)
	}
	return s
}

// lead runs the job that this process leads, with those that are left as often as some are
// lost.
func (s *survivors) lead(ctx context.Context, c spillway.Config, run func(spillway.Config) error) error {
	p := s.p
	for {
		err := run(c)
		if p.min == 0 {
			return err
		}
		suspect, lost := p.host.Loss()
		if err == nil || ctx.Err() != nil || lost == nil || p.job.Roll.Folder == "" {
			p.job.Roll.Close() // nobody looks for a verdict: the others have ended, or end
			return err
		}
		v, e := p.job.Roll.Call(ctx, []int{suspect}, s.decide)
		if e != nil {
			p.job.Roll.Close() // so that nobody waits for a verdict
			return fault(fmt.Errorf("%w; the job does not go on: %w", err, e))
		}
		if !v.On {
			return fault(fmt.Errorf("%w; %s", err, v.Why))
		}
		where, from := s.saved.from()
		fmt.Fprintf(s.out, "spillway: %s from %s: %s\n", v.Why, where, runAgain(max(0, p.reached-from)))
		if err = p.rejoin(v); err == nil {
			c, err = s.again(ctx, c)
		}
		if err != nil {
			p.job.Roll.Close()
			return err
		}
	}
}

// decide says who goes on of those that are here: the most that divide a step.
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
	team := launch.Team{Leaves: s.leaves, Min: s.p.min, Max: len(here), Processes: len(here)}
	sizes := slices.DeleteFunc(team.Sizes(), func(n int) bool { return n%s.shard != 0 })
	if len(sizes) == 0 {
		return rollcall.Verdict{Why: fmt.Sprintf("%s; of the job's ranks there are %d left, which gives no --min-ranks %d that divides a step of %d micro-batches", why, len(here), s.p.min, s.leaves)}
	}
	n := sizes[0]
	why += "; going on with " + english.Plural(n, "rank", "")
	if spare := here[n:]; len(spare) > 0 {
		why += fmt.Sprintf(" (%s %v not needed: %s ranks divide the step)", english.PluralWord(len(spare), "rank", ""), spare, nearest.Divisors(s.leaves, len(here)))
	}
	return rollcall.Verdict{On: true, Go: here[:n], Why: why}
}

// where says where a lost rank was, as far as it has told.
func (s *survivors) where(rank int) string {
	if s.p.host == nil {
		return ""
	}
	return s.p.host.Where(rank)
}

// again is the configuration of those that go on. Where it does not fit over fewer ranks as it
// was asked for, what rests on the device moves outward, which keeps the bits.
func (s *survivors) again(ctx context.Context, c spillway.Config) (spillway.Config, error) {
	c = c.Over(s.p.job)
	_, begun := s.saved.newest()
	c.Accum, c.Resume = s.leaves/c.Ranks, c.Resume || begun
	hw, onDevice, err := spillway.DeviceHardware(c)
	if err != nil {
		return c, err
	}
	_, err = spillway.Build(ctx, onDevice)
	var small *plan.DoesNotFit
	if !errors.As(err, &small) {
		return c, nil // what else is wrong the run finds
	}
	fmt.Fprintln(s.out, "spillway: as it was asked for the job does not fit over fewer ranks: going on with --fit")
	fixed := fixedBy(s.flags)
	fixed.Batch, fixed.Accum, fixed.Precision, fixed.AccumOrder = true, true, true, true
	return c, fitTo(ctx, &c, onDevice, fixed, 0, hw, s.out)
}

// fitTo makes c the fastest that fits.
func fitTo(ctx context.Context, c *spillway.Config, onDevice spillway.Config, fixed spillway.Fixed, rows int, hw spillway.Hardware, out io.Writer) error {
	found := newLiveLine(out).telling("searching for the fastest configuration that fits …")
	best, err := spillway.FitHere(ctx, onDevice, fixed, rows, hw)
	found()
	var none *spillway.NothingFits
	switch {
	case errors.As(err, &none):
		defer newLiveLine(out).telling("nothing fits; searching for what would …")()
		ways := none.WithWays(ctx, onDevice, hw)
		return cmp.Or(ctx.Err(), ways) // what was found is not all there is
	case err != nil:
		return err
	}
	printFitted(out, best)
	takeFitted(c, best)
	return nil
}

// rejoin makes this process one of those that go on.
func (p *place) rejoin(v rollcall.Verdict) error {
	_, world := p.host.Place()
	var without []int
	for rank := range world {
		if !slices.Contains(v.Go, rank) {
			without = append(without, rank)
		}
	}
	if err := p.host.Shrink(without); err != nil {
		return fault(fmt.Errorf("%s, but they do not meet: %w", v.Why, err))
	}
	before := p.job
	p.env.Rank, p.env.World = p.host.Place()
	p.job = &spillway.Job{Process: p.env.Rank, Processes: p.env.World, Locals: before.Locals, Local: before.Local,
		Transport: before.Transport, Outlives: before.Outlives, Roll: rollcall.Roll{Before: before.Roll.Folder}, Fastest: before.Fastest, Terms: before.Terms, Asked: before.Asked}
	p.link(p.job, p.streams())
	return nil
}

// follow is what a process that does not lead does once its part has ended with err: true if
// it is to lend its rank again.
func (p *place) follow(ctx context.Context, ended error) (again bool, err error) {
	_, lost := p.host.Loss()
	if p.min == 0 || lost == nil || p.job.Roll.Folder == "" {
		return false, ended
	}
	rank, _ := p.host.Place()
	v, err := p.job.Roll.Answer(ctx, rank)
	switch {
	case ended == nil && errors.Is(err, fs.ErrNotExist): // the run is over, and somebody was slow to leave
		return false, nil
	case err != nil:
		return false, fault(fmt.Errorf("%w; the job does not go on: %w", lost, err))
	case !v.On:
		return false, fault(fmt.Errorf("%w; %s", lost, v.Why))
	case slices.Contains(v.Lost, rank):
		return false, fault(fmt.Errorf("%w; the job goes on without this process, rank %d, which has answered too late: %s", lost, rank, v.Why))
	case !slices.Contains(v.Go, rank):
		fmt.Fprintf(p.stderr, "spillway: rank %d ends: %s\n", rank, v.Why)
		return false, nil
	}
	return true, p.rejoin(v)
}

// minRanks is --min-ranks where it may stand in a config file that is read as a whole later.
func minRanks(flags *pflag.FlagSet) (n int) {
	if path := flags.Lookup("config").Value.String(); path != "" && !flags.Changed("min-ranks") {
		flags = trainCommand().Flags()
		_ = applyConfigFile(flags, path) // rank 0 tells
	}
	n, _ = flags.GetInt("min-ranks")
	return n
}
