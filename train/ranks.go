package train

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/internal/crash"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/platform"
	"github.com/spillway-ml/spillway/platform/gpu"
	"github.com/spillway-ml/spillway/run"
	"github.com/spillway-ml/spillway/train/job"
)

// Work runs this process's ranks for the leader of the job until the leader dismisses it. The
// error is nil if the job ended in good order, or if the leader reports the error itself. began
// tells whether the leader gave this process a task. A canceled context ends the process and
// with it the job.
func Work(ctx context.Context, j *job.Job, warn func(string)) (began bool, err error) {
	return work(ctx, j, warn, nil)
}

// work is Work with parts that replace the machine's GPUs, for tests.
func work(ctx context.Context, j *job.Job, warn func(string), cuda *gpu.Parts) (began bool, err error) {
	link := j.Links[0]
	defer func() { err = errors.Join(err, link.Close()) }()
	stay := context.AfterFunc(ctx, func() {
		defer crash.Guard()
		link.Break(ctx.Err())
	})
	defer stay()
	a, program, err := j.Await(lookAtDisk)
	if a == nil {
		return false, err
	}
	q := request{a.Config, hooks{poison: a.Poison, checkWrites: a.CheckWrites, cuda: cuda}}
	q.Warn, q.Planned, q.Own = warn, j.Planned, j.Own
	t := &Trainer{job: j}
	defer func() { err = errors.Join(err, t.Close()) }()
	if err == nil {
		err = t.lend(ctx, q, program, a.Threads)
	}
	if err != nil {
		var small *MachineTooSmall
		var refused *plan.DoesNotFit
		host, _ := os.Hostname()
		err = link.Refused(fmt.Errorf("rank %d (host %s): %w", job.World(&q.Config).Local[0], host, err), errors.As(err, &small) || errors.As(err, &refused))
		return err == nil, err // the leader has ended and reports its own reason
	}
	err = link.Serve(t.ranks)
	var apart *run.NotJoined
	return !errors.As(err, &apart), err
}

// lead sends their task to the job's other processes.
func (t *Trainer) lead() error {
	if t.job == nil {
		return nil
	}
	a := job.Assignment{Config: t.cfg.Config, Threads: t.cfg.ComputeThreads(), Poison: t.cfg.poison, CheckWrites: t.cfg.checkWrites}
	a.Config.Threads = a.Threads
	if a.Config.AsyncSave = config.AsyncOff; t.plan.Config.Staging > 0 { // decided here, with the memory of the host that has the least
		a.Config.AsyncSave = config.AsyncOn
	}
	if t.job.Outlives {
		if t.saver == nil {
			return config.Refuse("Job.Outlives needs Config.Checkpoint: the folder to go on from")
		}
		in, err := t.saver.Folder()
		if err == nil {
			err = t.job.CallRoll(&t.cfg.Config, in)
		}
		if err != nil {
			return err
		}
	}
	return t.job.Lead(a, t.plan)
}

// lend makes the leader's plan in this process, and opens this process's ranks.
func (t *Trainer) lend(ctx context.Context, q request, program string, threads int) (err error) {
	if t.platform, q.Config, err = newPlatform(q); err != nil {
		return err
	}
	if err := t.fit(ctx, q); err != nil {
		return err
	}
	if own := job.ProgramHash(t.plan); own != program {
		return fmt.Errorf("its plan is another program (%.12s) than the leader's (%.12s): the model's files or the machines differ", own, program)
	}
	t.pool = pool.New(threads)
	if err := t.openDisk(); err != nil {
		return err
	}
	if err := t.platform.Start(t.setup()); err != nil {
		return err
	}
	var trace *exec.Trace // the leader writes it
	if t.cfg.Trace != "" {
		trace = exec.NewTrace(planner.TraceSpans)
		trace.Peak = t.cfg.PeakFlops
	}
	t.ranks, err = run.Open(run.RankOptions{World: job.World(&t.cfg.Config), Plan: t.plan, Platform: t.platform, Trace: trace, Meter: t.cfg.Measure, Poison: t.cfg.poison, Timeout: t.cfg.Timeout,
		Graphs: t.cfg.WithoutGraphs() == "", Warn: t.cfg.WarnOnce(), Folders: t.job.Folders(), Checkpoint: t.job.Folder()})
	return err
}

// setup returns the settings with which the platform opens ranks.
func (t *Trainer) setup() platform.Setup {
	s := platform.Setup{Plan: t.plan, Pool: t.pool, Collectives: t.cfg.Algorithm(), PerHost: job.PerHost(&t.cfg.Config)}
	if t.disk != nil {
		s.Disk = t.disk.Create
	}
	if t.job != nil {
		s.Failed, s.Fastest = t.job.Broken, t.job.Fastest
	}
	return s
}

// openRanks opens the ranks of this process and connects to those of the others.
func (t *Trainer) openRanks() error {
	cfg := t.cfg
	if cfg.Trace != "" {
		t.trace = exec.NewTrace(planner.TraceSpans)
		t.trace.Peak = cfg.PeakFlops
	}
	var opened func() error
	if m, ok := t.platform.(platform.Meeter); ok && m.Meets() {
		opened = t.job.Meeting(m)
	} else if err := t.job.Opened(); err != nil {
		return err
	}
	var err error
	t.ranks, err = run.Open(run.RankOptions{World: platform.OneProcess(cfg.Ranks), Plan: t.plan, Platform: t.platform, Trace: t.trace, Meter: cfg.Measure, Poison: cfg.poison,
		Graphs: cfg.WithoutGraphs() == "", Warn: cfg.WarnOnce(), Timeout: cfg.Timeout, Wrap: cfg.wrapDevice, Links: t.job.ByRank(cfg.LocalRanks), Opened: opened})
	return err
}
