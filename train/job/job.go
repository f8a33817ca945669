// Package job is this process's part of a run over several processes: who they are, whether
// they are alike, what the first tells the others to run, and how they end.
package job

import (
	"bytes"
	"cmp"
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
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/crash"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/hostmem"
	"github.com/spillway-ml/spillway/internal/rollcall"
	"github.com/spillway-ml/spillway/kernels/cpu/gemm"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/platform"
	"github.com/spillway-ml/spillway/run"
)

// Job is this process's part of a run over several processes. The first one leads:
// it resolves the configuration, reads the data, and tells the others what to run;
// all that a Trainer does is its. The others lend their ranks: see train.Work. Each runs
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

// Folders opens the folder of checkpoints of a process that lends its ranks; nil: the
// system's.
func (j *Job) Folders() filesys.Opener { return j.folders }

// Disk is the host whose folder of the disk tier has the least room for each rank; nil:
// not known.
func (j *Job) Disk() *config.HostMemory {
	if j == nil {
		return nil
	}
	return j.disk
}

// In has a process that lends its ranks save them in other folders than the system's. It is
// for tests.
func (j *Job) In(folders filesys.Opener) { j.folders = folders }

// Of is the job whose processes the ranks of a run are in; nil: there is none.
func Of(c *config.Config) *Job {
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

// World is the ranks that run in this process.
func World(c *config.Config) platform.World {
	if Of(c) == nil {
		return platform.OneProcess(c.Ranks)
	}
	w := platform.World{Size: c.Ranks}
	for i := range c.LocalRanks {
		w.Local = append(w.Local, Of(c).Process*c.LocalRanks+i)
	}
	return w
}

// Place is this process's number among those of its host.
func Place(c *config.Config) int {
	if Of(c) == nil {
		return 0
	}
	return Of(c).Local
}

// Transport is the transport of a run's job; nil: there is none.
func Transport(c *config.Config) platform.Transport {
	if Of(c) == nil {
		return nil
	}
	return Of(c).Transport
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
		_ = j.HangUp()
	})
}

// HangUp ends the streams, all at once: each waits a while for a process that does not
// take its end.
func (j *Job) HangUp() error {
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

// Assignment is what a process needs to run its ranks.
type Assignment struct {
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

// Hello is what this process says of itself.
func (j *Job) Hello() run.Hello {
	host, _ := os.Hostname()
	h := run.Hello{Rank: j.Process, Host: host, Build: buildID(), Rounding: gemm.Rounding(false), Terms: j.Terms, LocalRanks: j.Locals, LocalRank: j.Local, Memory: hostmem.Machine()}
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

// ProgramHash tells plans apart: the program and where its buffers lie.
func ProgramHash(p *plan.Plan) string {
	h := sha256.New()
	fmt.Fprint(h, graph.Format(p.Program), p.Layout.Offset)
	for _, s := range p.Layout.Spaces {
		fmt.Fprint(h, s.Peak, " ")
	}
	return hex.EncodeToString(h.Sum(nil))
}

// CallRoll makes the Roll of a job that outlives its processes, in the run's checkpoint
// folder, which is the Roll's from then on.
func (j *Job) CallRoll(c *config.Config, in filesys.Folder) error {
	r, err := rollcall.Open(in, c.Ranks, c.Timeout+endGrace, j.Roll)
	if err != nil {
		return fmt.Errorf("Config.Checkpoint %s: %w", c.Checkpoint, err)
	}
	j.Roll = r
	return nil
}

// enter opens the leader's Roll here.
func (j *Job) enter(r rollcall.Roll) (err error) {
	if r.Folder == "" {
		return nil
	}
	folders := j.folders
	if folders == nil {
		folders = filesys.System
	}
	if j.Roll, err = r.Enter(folders, j.Folder()); err != nil {
		return fmt.Errorf("Config.Checkpoint: this process does not find the leader's folder, in which those that are left meet: give one that all hosts share (%w)", err)
	}
	return nil
}

// Lead gives the other processes their task, once the plan stands. They open their ranks
// beside this process's: see Opened.
func (j *Job) Lead(a Assignment, p *plan.Plan) error {
	a.Fastest, a.Roll = j.Fastest, j.Roll
	a.Model, a.Rule = a.Config.Own.Names()
	a.Evaluates = a.Config.Own.Eval != nil
	var b bytes.Buffer
	if err := gob.NewEncoder(&b).Encode(a); err != nil {
		return fmt.Errorf("send the configuration: %w", err)
	}
	j.dismiss.Do(func() {}) // from here on they end with their streams
	task := run.Task{Config: b.Bytes(), Program: ProgramHash(p)}
	for _, l := range j.Links {
		if err := l.Assign(task); err != nil {
			return err
		}
	}
	return nil
}

// Opened waits until every process has opened its ranks.
func (j *Job) Opened() error {
	if j == nil {
		return nil
	}
	for _, l := range j.Links {
		if err := l.Opened(); err != nil {
			return err
		}
	}
	return nil
}

// Meeting waits for the other processes beside this one's own ranks, which meet theirs as
// they are opened: a process that can't open its own ends the job.
func (j *Job) Meeting(m platform.Meeter) func() error {
	ends := make(chan error, 1)
	go func() {
		defer crash.Guard()
		err := j.Opened()
		if err != nil {
			m.Abort(err)
		}
		ends <- err
	}()
	return sync.OnceValue(func() error { return <-ends })
}

// ByRank are the streams to the other processes' ranks, of so many a process.
func (j *Job) ByRank(ranks int) map[int]*run.Link {
	if j == nil {
		return nil
	}
	links := map[int]*run.Link{}
	for _, l := range j.Links {
		for i := range ranks {
			links[l.Rank+i] = l
		}
	}
	return links
}

// Await is what the leader tells this process to run; nil: nothing. The Assignment's Config
// has the paths that this process was asked to use, and its Threads.
func (j *Job) Await() (a *Assignment, program string, err error) {
	task, err := j.Links[0].Greet(j.Hello(), j.free)
	if err == nil && task.Differs {
		err = errors.New(task.Err)
	}
	if err != nil || task.Config == nil {
		return nil, "", j.apart(err)
	}
	a = &Assignment{}
	if err := gob.NewDecoder(bytes.NewReader(task.Config)).Decode(a); err != nil {
		return nil, "", fmt.Errorf("the leader's configuration: %w", err)
	}
	j.Fastest = a.Fastest
	a.Config = j.mine(a.Config.Within(j))
	if j.Asked != nil {
		a.Threads = j.Asked.ComputeThreads()
	}
	return a, task.Program, cmp.Or(j.enter(a.Roll), a.brought(&j.Own))
}

// endGrace is how long a process may take, behind the longest wait of a collective, to give
// back what it has and come to a roll call: ranks that do not end are waited for up to 10 s.
const endGrace = 15 * time.Second

// breakGrace is how long the ranks of a job that has failed have to say what they
// know of it. All processes end within a second of the failure, also those that hear
// of no other any more.
const breakGrace = 400 * time.Millisecond

// Broken ends the streams of a job that has ended with err: a process that is
// stopped or stuck does not answer any more.
func (j *Job) Broken(err error) {
	time.AfterFunc(breakGrace, func() {
		for _, l := range j.Links {
			go func() { // each may take a moment to close
				defer crash.Guard()
				l.Break(err)
			}()
		}
	})
}

// brought refuses a process whose program brings along something else than the
// leader's.
func (a *Assignment) brought(own *config.Own) error {
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

// PerHost is how many neighbouring ranks each host of the run has: of a job over
// processes as they say themselves.
func PerHost(c *config.Config) int {
	if Of(c) == nil {
		return c.Ranks
	}
	return c.PerHost
}
