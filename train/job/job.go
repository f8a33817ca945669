// Package job is this process's part of a run over several processes: the processes, the comparison
// of their settings, the task that the leader sends to the others, and the end of the job.
package job

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"debug/elf"
	"encoding/gob"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/spillway-ml/spillway/comm/algo"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/crash"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/hostmem"
	"github.com/spillway-ml/spillway/internal/release"
	"github.com/spillway-ml/spillway/internal/rollcall"
	"github.com/spillway-ml/spillway/kernels/cpu/gemm"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/platform"
	"github.com/spillway-ml/spillway/run"
)

// Job is this process's part of a run over several processes. The first process leads: it
// resolves the configuration, reads the data, runs the Trainer and tells the others what to
// run. The others run only their ranks: see train.Work. Each process runs Config.LocalRanks
// consecutive ranks, the first one ranks 0, 1, ….
type Job struct {
	Process, Processes int // this process's number, and how many processes there are
	// Locals is how many of the processes run on this host; 0: unknown.
	Locals    int
	Local     int // this process's number among those on this host
	Transport platform.Transport
	// Links are the leader's streams to processes 1, 2, …; in another process, its stream to
	// the leader.
	Links []*run.Link
	// Planned is Config.Planned for a process other than the leader.
	Planned func(*plan.Plan)
	// Fastest is the algorithm that Config.Collectives auto chooses for each collective where
	// ranks send messages. All processes use the leader's.
	Fastest algo.Table
	// Own is Config.Own of a process other than the leader. It must match the leader's; streams
	// cannot carry it.
	Own config.Own
	// Terms are settings that all processes of the job must share, by name, such as those that
	// the function Terms returns. The leader refuses a difference. A name that one process
	// lacks is not compared.
	Terms map[string]string
	// Asked is the configuration that this process was started with; nil if it uses only the
	// leader's. Its paths and Threads apply to this process alone; of memory caps the smallest of
	// any process applies.
	Asked *config.Config
	// Refused is an error in the configuration that this process was started with. The leader
	// then refuses the job with that error.
	Refused error
	// Outlives makes the leader create a rollcall.Roll in Config.Checkpoint, where the
	// surviving processes meet after others are lost. All processes open it when the run
	// begins.
	Outlives bool
	Roll     rollcall.Roll

	folders filesys.Opener // opener of the checkpoint folder, see In

	heard   bool               // all processes have described themselves
	greeted bool               // the leader has received all descriptions
	perHost int                // consecutive ranks on each host; 0: they differ, or are unknown
	least   *config.HostMemory // nil: no host's memory is known
	disk    *config.HostMemory // likewise for the file system of the disk tier
	// unwritable refuses the run because another process cannot write in its folder of the disk
	// tier; nil: all can.
	unwritable func() error
	caps       [graph.NumSpaces]int64 // the smallest of any process; 0: none
	differ     bool                   // the processes are not alike
	dismiss    sync.Once
}

// Folders opens the checkpoint folder of a process other than the leader; nil means
// filesys.System.
func (j *Job) Folders() filesys.Opener { return j.folders }

// Disk returns the host with the least room for each rank in its folder of the disk tier; nil if
// unknown.
func (j *Job) Disk() *config.HostMemory {
	if j == nil {
		return nil
	}
	return j.disk
}

// In replaces the opener of the checkpoint folder of a process other than the leader. It is for
// tests.
func (j *Job) In(folders filesys.Opener) { j.folders = folders }

// Of returns the job that a run's ranks belong to; nil if there is none.
func Of(c *config.Config) *Job {
	j, _ := c.Processes().(*Job)
	return j
}

// Count returns the number of processes.
func (j *Job) Count() int {
	if j == nil {
		return 0
	}
	return j.Processes
}

// Seat sets the first rank of each stream's process, given the ranks per process.
func (j *Job) Seat(ranks int) {
	for i, l := range j.Links {
		l.Rank = (i + 1) * ranks
	}
}

// Memory returns the memory of the host that has the least for each rank, given the ranks per
// process.
func (j *Job) Memory(ranks int) config.HostMemory {
	if j.least != nil {
		return *j.least
	}
	return config.HostMemory{Bytes: hostmem.Machine(), Ranks: ranks * cmp.Or(j.Locals, j.Processes)}
}

// Outside returns the host memory, in bytes, that the transport needs in each process outside the
// ranks' arenas. copies says whether other ranks' data are copied into this process's memory.
func (j *Job) Outside(ranks int) (bytes int64, copies bool) {
	if t, ok := j.Transport.(interface{ Copies() bool }); ok {
		copies = t.Copies()
	}
	if t, ok := j.Transport.(platform.TransportMemory); ok {
		bytes = t.OutsideBytes(j.Processes, ranks)
	}
	return bytes, copies
}

// World returns a description of the ranks that run in this process.
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

// Place returns this process's number among those on its host.
func Place(c *config.Config) int {
	if Of(c) == nil {
		return 0
	}
	return Of(c).Local
}

// Transport returns the transport of a run's job; nil if there is none.
func Transport(c *config.Config) platform.Transport {
	if Of(c) == nil {
		return nil
	}
	return Of(c).Transport
}

// Dismiss tells the other processes that still wait for a task to end. err, if not nil, is the
// reason. The leader calls it when it ends.
func (j *Job) Dismiss(err error) {
	j.dismiss.Do(func() {
		var t run.Task
		if err != nil {
			t.Err, t.Differs = err.Error(), j.differ
		}
		for _, l := range j.Links {
			if l.Assign(t) == nil && !j.heard {
				_, _ = l.Welcome() // reads what it has sent, so that closing does not reset the stream
			}
		}
		_ = j.HangUp()
	})
}

// HangUp closes the streams concurrently: each close waits a while for a process that does not
// acknowledge it.
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

// Assignment is the leader's message that makes a process run its ranks.
type Assignment struct {
	Config  config.Config
	Threads int // computing threads per process
	Fastest algo.Table
	// Model and Rule name the leader's own model and update rule. Evaluates says that the leader's
	// program provides held-out data.
	Model, Rule string
	Evaluates   bool
	Roll        rollcall.Roll
	// The hooks that apply in all processes.
	Poison, CheckWrites bool
}

// Hello returns this process's description of itself.
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

// LookAtDisk checks whether this process can use a folder for the disk tier. refused is set if it
// cannot; unwritable is set if it cannot should the plan need the tier.
type LookAtDisk func(dir string) (refused, unwritable error)

// lookAtDisk describes the disk tier's folder dir, which is the leader's or this process's own.
func (j *Job) lookAtDisk(dir string, h *run.Hello, look LookAtDisk) {
	if j.Asked != nil {
		dir = j.Asked.Disk
	}
	h.Disk = store.Free(dir)
	refused, unwritable := look(dir)
	if refused != nil {
		h.Refused = refused.Error()
	}
	if unwritable != nil {
		h.Unwritable = unwritable.Error()
	}
}

// Unwritable returns the error for a run that needs the disk tier if another process cannot write
// in its folder.
func (j *Job) Unwritable() error {
	if j == nil || j.unwritable == nil {
		return nil
	}
	return j.unwritable()
}

// buildID identifies a build of the program: by its commit if it has no changes, otherwise by the
// build ID that Go's linker wrote, and without one by the hash of the executable. The hash takes
// longer than all other steps of joining a job.
var buildID = sync.OnceValue(func() string {
	if at, changed := release.Commit(); at != "" && !changed {
		return at
	}
	path, err := os.Executable()
	if err != nil {
		return "unknown (" + err.Error() + ")"
	}
	content := linkerID(path)
	if content == nil {
		if content, err = os.ReadFile(path); err != nil {
			return "unknown (" + err.Error() + ")"
		}
	}
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:8])
})

// linkerID returns the build ID in an ELF file, which is the same only for the same sources,
// compiler and flags; nil if there is none.
func linkerID(path string) []byte {
	f, err := elf.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	note := f.Section(".note.go.buildid")
	if note == nil {
		return nil
	}
	id, err := note.Data()
	if err != nil {
		return nil
	}
	return id
}

// ProgramHash identifies a plan: the program and the placement of its buffers.
func ProgramHash(p *plan.Plan) string {
	h := sha256.New()
	fmt.Fprint(h, graph.Format(p.Program), p.Layout.Offset)
	for _, s := range p.Layout.Spaces {
		fmt.Fprint(h, s.Peak, " ")
	}
	return hex.EncodeToString(h.Sum(nil))
}

// CallRoll makes the Roll of a job with Outlives in the run's checkpoint folder. The Roll takes
// over the folder in.
func (j *Job) CallRoll(c *config.Config, in filesys.Folder) error {
	r, err := rollcall.Open(in, c.Ranks, c.Timeout+endGrace, j.Roll)
	if err != nil {
		return fmt.Errorf("Config.Checkpoint %s: %w", c.Checkpoint, err)
	}
	j.Roll = r
	return nil
}

// enter opens the leader's Roll in this process.
func (j *Job) enter(r rollcall.Roll) (err error) {
	if r.Folder == "" {
		return nil
	}
	folders := j.folders
	if folders == nil {
		folders = filesys.System
	}
	if j.Roll, err = r.Enter(folders, j.Folder()); err != nil {
		return fmt.Errorf("Config.Checkpoint: this process cannot find the leader's folder, where the surviving ranks meet after a loss: give a folder that all hosts share (%w)", err)
	}
	return nil
}

// Lead sends the other processes their task once the plan exists. They open their ranks while
// this process opens its own: see Opened.
func (j *Job) Lead(a Assignment, p *plan.Plan) error {
	a.Fastest, a.Roll = j.Fastest, j.Roll
	a.Model, a.Rule = a.Config.Own.Names()
	a.Evaluates = a.Config.Own.Eval != nil
	var b bytes.Buffer
	if err := gob.NewEncoder(&b).Encode(a); err != nil {
		return fmt.Errorf("send the configuration: %w", err)
	}
	j.dismiss.Do(func() {}) // from here on the other processes end when their streams do
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

// Meeting waits for the other processes while this one opens its ranks, which connect to
// theirs. A process that can't open its ranks ends the job.
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

// ByRank returns the streams to the other processes' ranks, given the ranks per process.
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

// Await returns the leader's task for this process; nil if there is none. The Assignment's Config
// has the paths and Threads that this process was started with.
func (j *Job) Await(look LookAtDisk) (a *Assignment, program string, err error) {
	task, err := j.Links[0].Greet(j.Hello(), func(dir string, h *run.Hello) { j.lookAtDisk(dir, h, look) })
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

// endGrace is how long, after the longest wait of a collective, a process may take to release its
// resources and join a roll call. Ranks that do not end are waited for up to 10 s.
const endGrace = 15 * time.Second

// breakGrace is how long the ranks of a failed job have to report what they know of the failure.
// All processes end within a second of it, including those that lost their connections.
const breakGrace = 400 * time.Millisecond

// Broken closes the streams of a job that ended with err. A stopped or stuck process no longer
// answers.
func (j *Job) Broken(err error) {
	time.AfterFunc(breakGrace, func() {
		for _, l := range j.Links {
			go func() { // each close may take a moment
				defer crash.Guard()
				l.Break(err)
			}()
		}
	})
}

// brought refuses a process whose program has another own model or rule than the leader's.
func (a *Assignment) brought(own *config.Own) error {
	model, rule := own.Names()
	switch {
	case model != a.Model:
		return fmt.Errorf("Job.Own.Model is %.80q in this process and %.80q in the leader's Config.Own; give every process the same", model, a.Model)
	case rule != a.Rule:
		return fmt.Errorf("Job.Own.Rule is %.80q in this process and %.80q in the leader's Config.Own; give every process the same", rule, a.Rule)
	case a.Evaluates != (own.Eval != nil):
		return errors.New("Job.Own.Eval is set in this process or in the leader's Config.Own, but not in both; give held-out data in every process or in none")
	}
	return nil
}

// PerHost returns how many consecutive ranks each host of the run has. In a job over processes it
// uses the processes' own descriptions.
func PerHost(c *config.Config) int {
	if Of(c) == nil {
		return c.Ranks
	}
	return c.PerHost
}
