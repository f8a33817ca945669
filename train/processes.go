package train

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/gob"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"github.com/spillway-ml/spillway/comm/algo"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/crash"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/hostmem"
	"github.com/spillway-ml/spillway/internal/rollcall"
	"github.com/spillway-ml/spillway/kernels/cpu/gemm"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/platform"
	"github.com/spillway-ml/spillway/platform/gpu"
	"github.com/spillway-ml/spillway/run"
)

// Job is this process's part of a run over several processes. The first one leads:
// it resolves the configuration, reads the data, and tells the others what to run;
// all that a Trainer does is its. The others lend their ranks: see Work. Each runs
// Config.LocalRanks neighbouring ranks, the first process ranks 0, 1, ….
type Job struct {
	Process, Processes int // its number, and how many there are
	// Locals is how many of the processes run on this host; 0: nobody says.
	Locals    int
	Local     int // its place among them
	Transport platform.Transport
	// Links are the leader's streams to processes 1, 2, …; another's to the leader.
	Links []*run.Link
	// Planned is Config.Planned of a process that lends its ranks.
	Planned func(*plan.Plan)
	// Fastest is what Config.Collectives auto chooses by where ranks send messages; the
	// leader's is everybody's.
	Fastest algo.Table
	// Own is Config.Own of a process that lends its ranks: what the leader's has, which
	// no stream carries.
	Own config.Own
	// Terms is what all processes of the job must have alike, by name, such as what Terms
	// returns: the leader refuses a difference. What one of them does not name is not compared.
	Terms map[string]string
	// Asked is what this process was asked to run, nil where it takes all from the leader.
	// Its paths and Threads are this process's own; of caps on memory the smallest of any
	// process counts.
	Asked *config.Config
	// Refused is what is wrong with what this process was asked to run: the leader refuses
	// the job with it.
	Refused error
	// Outlives has the leader make, in Config.Checkpoint, a Roll for those that are left
	// where processes are lost. All of them have it as the run begins.
	Outlives bool
	Roll     rollcall.Roll

	cuda *gpu.Parts // takes the place of hooks.cuda, for tests

	folders filesys.Opener // see In

	heard   bool                   // something of each process
	greeted bool                   // the leader has heard who the others are
	perHost int                    // neighbouring ranks that each host has; 0: they differ, or nobody says
	least   *config.HostMemory     // nil: no host's memory is known
	disk    *config.HostMemory     // the same of the folder of the disk tier
	caps    [graph.NumSpaces]int64 // the smallest of any process; 0: none
	differ  bool                   // the processes are not alike
	dismiss sync.Once
}

// In has a process that lends its ranks save them in other folders than the system's. It is
// for tests.
func (j *Job) In(folders filesys.Opener) { j.folders = folders }

// jobOf is the job whose processes the ranks of a run are in; nil: there is none.
func jobOf(c *config.Config) *Job {
	j, _ := c.Processes().(*Job)
	return j
}

// Count is how many processes there are.
func (j *Job) Count() int {
	if j == nil {
		return 0
	}
	return j.Processes
}

// Seat tells the streams which ranks they are to, of processes of so many.
func (j *Job) Seat(ranks int) {
	for i, l := range j.Links {
		l.Rank = (i + 1) * ranks
	}
}

// Memory is that of the host with the least for each rank, of so many ranks a process.
func (j *Job) Memory(ranks int) config.HostMemory {
	if j.least != nil {
		return *j.least
	}
	return config.HostMemory{Bytes: hostmem.Machine(), Ranks: ranks * cmp.Or(j.Locals, j.Processes)}
}

// Outside is the host memory, in bytes, that the transport takes of a process of so many
// ranks outside their arenas, and whether parts of other ranks are copied into it.
func (j *Job) Outside(ranks int) (bytes int64, copies bool) {
	if t, ok := j.Transport.(interface{ Copies() bool }); ok {
		copies = t.Copies()
	}
	if t, ok := j.Transport.(platform.TransportMemory); ok {
		bytes = t.OutsideBytes(j.Processes, ranks)
	}
	return bytes, copies
}

// world is the ranks that run in this process.
func world(c *config.Config) platform.World {
	if jobOf(c) == nil {
		return platform.OneProcess(c.Ranks)
	}
	w := platform.World{Size: c.Ranks}
	for i := range c.LocalRanks {
		w.Local = append(w.Local, jobOf(c).Process*c.LocalRanks+i)
	}
	return w
}

// place is this process's number among those of its host.
func place(c *config.Config) int {
	if jobOf(c) == nil {
		return 0
	}
	return jobOf(c).Local
}

func transport(c *config.Config) platform.Transport {
	if jobOf(c) == nil {
		return nil
	}
	return jobOf(c).Transport
}

// Dismiss lets the other processes go that still wait for something to do. With
// an error they were not needed because of it. The leader calls it at its end.
func (j *Job) Dismiss(err error) {
	j.dismiss.Do(func() {
		var t run.Task
		if err != nil {
			t.Err, t.Differs = err.Error(), j.differ
		}
		for _, l := range j.Links {
			if l.Assign(t) == nil && !j.heard {
				_, _ = l.Welcome() // so that what it has said does not reset the stream
			}
		}
		_ = j.hangUp()
	})
}

// hangUp ends the streams, all at once: each waits a while for a process that does not
// take its end.
func (j *Job) hangUp() error {
	errs := make([]error, len(j.Links))
	var closing sync.WaitGroup
	for i, l := range j.Links {
		closing.Go(func() {
			defer crash.Guard()
			errs[i] = l.Close()
		})
	}
	closing.Wait()
	return errors.Join(errs...)
}

// assignment is what a process needs to run its ranks.
type assignment struct {
	Config  config.Config
	Threads int // computing threads of a process
	Fastest algo.Table
	// Model and Rule name what the leader's program brings along, and Evaluates says that
	// it has held-out data of its own.
	Model, Rule string
	Evaluates   bool
	Roll        rollcall.Roll
	// Of hooks, those that hold in all processes.
	Poison, CheckWrites bool
}

// hello is what this process says of itself.
func (j *Job) hello() run.Hello {
	host, _ := os.Hostname()
	h := run.Hello{Rank: j.Process, Host: host, Build: buildID(), Rounding: gemm.Rounding(), Terms: j.Terms, LocalRanks: j.Locals, LocalRank: j.Local, Memory: hostmem.Machine()}
	if j.Refused != nil {
		h.Refused = j.Refused.Error()
	}
	if c := j.Asked; c != nil {
		h.Caps[graph.Device], h.Caps[graph.Host], h.Caps[graph.Disk] = c.DeviceMemory, c.HostMemory, c.DiskMemory
	}
	return h
}

// free is what is free in the leader's folder of the disk tier, or in this process's own.
func (j *Job) free(dir string) int64 {
	if j.Asked != nil {
		dir = j.Asked.Disk
	}
	return store.Free(dir)
}

// buildID tells builds of the program apart: by its version control state, or, of
// a build without one, by the hash of its file.
var buildID = sync.OnceValue(func() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		revision, modified := "", ""
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				revision = s.Value
			case "vcs.modified":
				modified = s.Value
			}
		}
		if revision != "" && modified == "false" {
			return revision
		}
	}
	path, err := os.Executable()
	if err == nil {
		var content []byte
		if content, err = os.ReadFile(path); err == nil {
			sum := sha256.Sum256(content)
			return hex.EncodeToString(sum[:8])
		}
	}
	return "unknown (" + err.Error() + ")"
})

// programHash tells plans apart: the program and where its buffers lie.
func programHash(p *plan.Plan) string {
	h := sha256.New()
	fmt.Fprint(h, graph.Format(p.Program), p.Layout.Offset)
	for _, s := range p.Layout.Spaces {
		fmt.Fprint(h, s.Peak, " ")
	}
	return hex.EncodeToString(h.Sum(nil))
}

// lead gives the other processes their task, once the plan stands. They open
// their ranks beside this process's: see opened.
func (t *Trainer) lead() error {
	j := jobOf(&t.cfg.Config)
	if j == nil {
		return nil
	}
	a := assignment{Config: t.cfg.Config, Threads: t.cfg.ComputeThreads(), Fastest: j.Fastest, Poison: t.cfg.poison, CheckWrites: t.cfg.checkWrites}
	a.Config.Threads = a.Threads
	a.Model, a.Rule = t.cfg.Own.Names()
	a.Evaluates = t.cfg.Own.Eval != nil
	if a.Config.AsyncSave = config.AsyncOff; t.plan.Config.Staging > 0 { // decided here, with the least host's memory
		a.Config.AsyncSave = config.AsyncOn
	}
	if j.Outlives {
		var err error
		if t.cfg.Checkpoint == "" {
			return config.Refuse("Job.Outlives needs Config.Checkpoint: the folder to go on from")
		}
		if j.Roll, err = rollcall.Open(t.cfg.Checkpoint, t.cfg.Ranks, t.cfg.Timeout+endGrace, j.Roll); err != nil {
			return fmt.Errorf("Config.Checkpoint %s: %w", t.cfg.Checkpoint, err)
		}
		a.Roll = j.Roll
	}
	var b bytes.Buffer
	if err := gob.NewEncoder(&b).Encode(a); err != nil {
		return fmt.Errorf("send the configuration: %w", err)
	}
	j.dismiss.Do(func() {}) // from here on they end with their streams
	task := run.Task{Config: b.Bytes(), Program: programHash(t.plan)}
	for _, l := range j.Links {
		if err := l.Assign(task); err != nil {
			return err
		}
	}
	return nil
}

// endGrace is how long a process may take, behind the longest wait of a collective, to give
// back what it has and come to a roll call: ranks that do not end are waited for up to 10 s.
const endGrace = 15 * time.Second

// opened waits until every process has opened its ranks.
func (t *Trainer) opened() error {
	if jobOf(&t.cfg.Config) == nil {
		return nil
	}
	for _, l := range jobOf(&t.cfg.Config).Links {
		if err := l.Opened(); err != nil {
			return err
		}
	}
	return nil
}

// links are the streams to the other processes' ranks, by rank.
func (t *Trainer) links() map[int]*run.Link {
	if jobOf(&t.cfg.Config) == nil {
		return nil
	}
	links := map[int]*run.Link{}
	for _, l := range jobOf(&t.cfg.Config).Links {
		for i := range t.cfg.LocalRanks {
			links[l.Rank+i] = l
		}
	}
	return links
}

// meeting waits for the other processes beside this one's own ranks, which meet theirs as
// they are opened: a process that can't open its own ends the job.
func (t *Trainer) meeting(m platform.Meeter) func() error {
	ends := make(chan error, 1)
	go func() {
		defer crash.Guard()
		err := t.opened()
		if err != nil {
			m.Abort(err)
		}
		ends <- err
	}()
	return sync.OnceValue(func() error { return <-ends })
}

// breakGrace is how long the ranks of a job that has failed have to say what they
// know of it. All processes end within a second of the failure, also those that hear
// of no other any more.
const breakGrace = 400 * time.Millisecond

// broken ends the streams of a job that has ended with err: a process that is
// stopped or stuck does not answer any more.
func (j *Job) broken(err error) {
	time.AfterFunc(breakGrace, func() {
		for _, l := range j.Links {
			go func() { // each may take a moment to close
				defer crash.Guard()
				l.Break(err)
			}()
		}
	})
}

// Work runs this process's ranks for the process that leads the job, until that
// lets it go. Its error is nil where the job ended in good order, or the leader
// tells a person what was wrong. began tells whether there was something to run, and
// a leader to run it for. A canceled context ends it, and with it the job.
func Work(ctx context.Context, j *Job, warn func(string)) (began bool, err error) {
	link := j.Links[0]
	defer func() { err = errors.Join(err, link.Close()) }()
	stay := context.AfterFunc(ctx, func() {
		defer crash.Guard()
		link.Break(ctx.Err())
	})
	defer stay()
	task, err := link.Greet(j.hello(), j.free)
	if err == nil && task.Differs {
		err = errors.New(task.Err)
	}
	if err != nil || task.Config == nil {
		return false, err
	}
	var a assignment
	if err := gob.NewDecoder(bytes.NewReader(task.Config)).Decode(&a); err != nil {
		return true, fmt.Errorf("the leader's configuration: %w", err)
	}
	j.Fastest, j.Roll = a.Fastest, a.Roll
	q := request{a.Config, hooks{poison: a.Poison, checkWrites: a.CheckWrites}}
	q.Config = j.mine(q.Within(j))
	threads := a.Threads
	if j.Asked != nil {
		threads = j.Asked.ComputeThreads()
	}
	q.Warn, q.Planned, q.Own, q.cuda = warn, j.Planned, j.Own, j.cuda
	t := &Trainer{job: j}
	defer func() { err = errors.Join(err, t.Close()) }()
	err = a.brought(&j.Own)
	if err == nil {
		err = t.lend(ctx, q, task.Program, threads)
	}
	if err != nil {
		var small *MachineTooSmall
		var refused *plan.DoesNotFit
		host, _ := os.Hostname()
		err = link.Refused(fmt.Errorf("rank %d (host %s): %w", world(&q.Config).Local[0], host, err), errors.As(err, &small) || errors.As(err, &refused))
		return err == nil, err // a leader that has gone had a reason of its own
	}
	err = link.Serve(t.ranks)
	var apart *run.NotJoined
	return !errors.As(err, &apart), err
}

// lend plans what the leader has planned, and opens this process's ranks.
func (t *Trainer) lend(ctx context.Context, q request, program string, threads int) (err error) {
	if t.platform, q.Config, err = newPlatform(q); err != nil {
		return err
	}
	if err := t.fit(ctx, q); err != nil {
		return err
	}
	if own := programHash(t.plan); own != program {
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
	}
	t.ranks, err = run.Open(run.RankOptions{World: world(&t.cfg.Config), Plan: t.plan, Platform: t.platform, Trace: trace, Meter: t.cfg.Measure, Poison: t.cfg.poison, Timeout: t.cfg.Timeout,
		Graphs: t.cfg.WithoutGraphs() == "", Warn: t.cfg.WarnOnce(), Folders: t.job.folders, Checkpoint: t.job.folder()})
	return err
}

// setup is what the platform starts with.
func (t *Trainer) setup() platform.Setup {
	s := platform.Setup{Plan: t.plan, Pool: t.pool, Collectives: t.cfg.Algorithm(), PerHost: perHost(&t.cfg.Config)}
	if t.disk != nil {
		s.Disk = t.disk.Create
	}
	if jobOf(&t.cfg.Config) != nil {
		s.Failed, s.Fastest = jobOf(&t.cfg.Config).broken, jobOf(&t.cfg.Config).Fastest
	}
	return s
}

// openRanks opens the ranks of this process and takes those of the others.
func (t *Trainer) openRanks() error {
	cfg := t.cfg
	if cfg.Trace != "" {
		t.trace = exec.NewTrace(planner.TraceSpans)
	}
	var opened func() error
	if m, ok := t.platform.(platform.Meeter); ok && m.Meets() {
		opened = t.meeting(m)
	} else if err := t.opened(); err != nil {
		return err
	}
	var err error
	t.ranks, err = run.Open(run.RankOptions{World: platform.OneProcess(cfg.Ranks), Plan: t.plan, Platform: t.platform, Trace: t.trace, Meter: cfg.Measure, Poison: cfg.poison,
		Graphs: cfg.WithoutGraphs() == "", Warn: cfg.WarnOnce(), Timeout: cfg.Timeout, Wrap: cfg.wrapDevice, Links: t.links(), Opened: opened})
	return err
}

// brought refuses a process whose program brings along something else than the
// leader's.
func (a *assignment) brought(own *config.Own) error {
	model, rule := own.Names()
	switch {
	case model != a.Model:
		return fmt.Errorf("Job.Own.Model is %.80q here and %.80q of the leader's Config.Own; every process brings the same", model, a.Model)
	case rule != a.Rule:
		return fmt.Errorf("Job.Own.Rule is %.80q here and %.80q of the leader's Config.Own; every process brings the same", rule, a.Rule)
	case a.Evaluates != (own.Eval != nil):
		return errors.New("Job.Own.Eval and the leader's Config.Own.Eval: every process brings held-out data, or none does")
	}
	return nil
}

// perHost is how many neighbouring ranks each host of the run has: of a job over
// processes as they say themselves.
func perHost(c *config.Config) int {
	if jobOf(c) == nil {
		return c.Ranks
	}
	return c.PerHost
}
