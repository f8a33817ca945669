// Package jobs connects this process with the others of its job and checks that their settings
// agree. It also lets the others continue after some are lost.
package jobs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/calibration"
	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/host"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/relay"
	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/algo"
	"github.com/spillway-ml/spillway/comm/mpi"
	"github.com/spillway-ml/spillway/comm/nccl"
	"github.com/spillway-ml/spillway/comm/shm"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/crash"
	"github.com/spillway-ml/spillway/launch"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/platform"
	"github.com/spillway-ml/spillway/platform/gpu"
	ranks "github.com/spillway-ml/spillway/run"
)

// Place is this process's role in a job over processes.
type Place struct {
	Env       cluster.Env
	Transport string
	asked     string // the value of --transport
	Job       *spillway.Job
	Min       int        // --min-ranks; 0: a lost process ends the job
	host      *nccl.Host // nil: another transport connects the processes
	reached   int        // the last completed step
	timeout   time.Duration
	Stderr    io.Writer
	Close     func() error
}

// FindPlace detects the launcher from the environment, and resolves --transport for ranks on a
// device. Only rank 0 prints the error.
func FindPlace(transport, device string, stderr io.Writer) (*Place, error) {
	env, err := cluster.Read(os.Getenv)
	if err != nil {
		return nil, err
	}
	p := &Place{Env: env, asked: strings.ToLower(transport), Stderr: stderr, Close: func() error { return nil }}
	if p.asked == cluster.Auto && env.World > 1 && strings.EqualFold(device, "cuda") {
		transport = cluster.NCCL // the only possible choice; its error names missing variables
	}
	if env.Source == cluster.Alone {
		if why := cluster.Overlooked(os.Getenv); why != "" {
			fmt.Fprintln(stderr, "warning:", why)
		}
	}
	if p.Transport, err = env.Transport(transport); err != nil {
		if start := withRoot(env, strings.ToLower(transport)); start != "" {
			err = fmt.Errorf("%w; the first as a whole command: %s", err, start)
		}
		if env.Rank > 0 {
			err = &cli.SilentError{Err: err}
		}
		return nil, err
	}
	return p, nil
}

// withRoot returns a complete command that starts a job on GPUs again with the address that is
// missing, or "" if none is.
func withRoot(env cluster.Env, transport string) string {
	if transport != cluster.NCCL || env.World == 1 || env.NCCLRoot != "" {
		return ""
	}
	launcher := map[cluster.Source]string{cluster.Slurm: "srun ", cluster.Torchrun: fmt.Sprintf("torchrun --no-python --nproc-per-node %d ", cmp.Or(env.LocalWorld, env.World))}
	return cluster.NCCLRoot + "=HOST:PORT " + launcher[env.Source] + "spillway " + planner.Shell(os.Args[1:])
}

// Progress tells the launcher the number of completed steps.
func (p *Place) Progress(step int) {
	p.reached = max(p.reached, step)
	if p.Job == nil {
		return
	}
	if memory, ok := p.Job.Transport.(sharedMemory); ok {
		memory.job.SetSteps(step)
	}
}

// Leads reports whether the process leads: as rank 0 of its job, or because it is alone.
func (p *Place) Leads() bool { return p.Transport == cluster.InProc || p.Env.Rank == 0 }

// spareProcs is the number of the runtime's processors beyond the compute threads: the watchdog and
// a stream that waits for a peer need one to continue.
const spareProcs = 2

// threads returns the number of this process's compute threads: its share of asked, the launcher's
// setting, or its share of the host's processors.
func (p *Place) threads(asked int) int {
	switch local := max(1, p.Env.LocalWorld); {
	case asked > 0:
		return max(1, asked/local)
	case p.Env.Threads > 0:
		return p.Env.Threads
	case runtime.NumCPU() < host.OnlineCPUs(): // bound by the launcher
		return runtime.NumCPU()
	default:
		return max(1, runtime.NumCPU()/local)
	}
}

// join connects this process with the others, and waits for each of them for up to timeout.
func (p *Place) join(timeout time.Duration) (err error) {
	p.timeout = cmp.Or(timeout, spillway.Default().Timeout)
	var conns []io.ReadWriteCloser
	j := &spillway.Job{Process: p.Env.Rank, Processes: p.Env.World, Locals: p.Env.LocalWorld, Local: p.Env.LocalRank}
	switch p.Transport {
	case cluster.SHM:
		var memory *shm.Job
		if memory, conns, err = launch.Inherited(p.Env); err != nil {
			return err
		}
		j.Transport, p.Close = sharedMemory{memory}, memory.Close
	case cluster.MPI:
		if conns, err = p.startMPI(j); err != nil {
			return err
		}
	case cluster.NCCL:
		if conns, err = p.startNCCL(j); err != nil {
			return err
		}
	default:
		return fmt.Errorf("--transport %s joins no processes", p.Transport)
	}
	p.link(j, conns)
	p.Job = j
	return nil
}

// link adds the streams between rank 0 and the others to the job.
func (p *Place) link(j *spillway.Job, conns []io.ReadWriteCloser) {
	for i, c := range conns {
		peer := 0
		if p.Env.Rank == 0 {
			peer = i + 1
		}
		link := ranks.NewLink(peer, c)
		link.Interrupted = cli.Interrupt
		link.Meet(p.timeout, func() string {
			if memory, ok := j.Transport.(sharedMemory); ok {
				return memory.job.Where(peer)
			}
			return "" // not known until the peer sends it
		})
		j.Links = append(j.Links, link)
	}
}

// MpiFamilies returns the MPI libraries that a launcher may start processes for, in the order in
// which they are tried.
func MpiFamilies(launcher cluster.Source) []mpi.Family {
	switch launcher {
	case cluster.OpenMPI:
		return []mpi.Family{mpi.OpenMPI}
	case cluster.PMIx:
		return []mpi.Family{mpi.OpenMPI, mpi.ABI, mpi.MPICH}
	}
	return []mpi.Family{mpi.ABI, mpi.MPICH}
}

// startMPI opens the launcher's MPI and the streams between rank 0 and the others.
func (p *Place) startMPI(j *spillway.Job) (conns []io.ReadWriteCloser, err error) {
	process, err := mpi.Start(MpiFamilies(p.Env.Source), p.Env.Rank, p.Env.World, p.timeout)
	if err != nil {
		return nil, err
	}
	j.Transport, p.Close = messages{process, p.Stderr}, process.Close
	for peer := range p.Env.World {
		if peer == p.Env.Rank || p.Env.Rank > 0 && peer > 0 {
			continue
		}
		c, err := process.Stream(peer)
		if err != nil {
			return nil, err
		}
		conns = append(conns, c)
	}
	return conns, nil
}

// startNCCL connects the processes by NCCL alone, and opens the streams between rank 0 and the
// others.
func (p *Place) startNCCL(j *spillway.Job) (conns []io.ReadWriteCloser, err error) {
	if p.host, err = gpu.StartNCCL(p.Env.Rank, p.Env.World, p.Env.LocalRank, p.Min > 0, nil); err != nil {
		if p.Min > 0 {
			err = fmt.Errorf("%w (with --min-ranks %d)", err, p.Min)
		}
		return nil, err
	}
	j.Transport, j.Outlives, p.Close = gpu.OverNCCL{Host: p.host}, p.Min > 0, p.host.Close
	return p.streams(), nil
}

// streams returns the streams of p.host by rank: rank 0 has one to each rank, the others one to
// rank 0.
func (p *Place) streams() (conns []io.ReadWriteCloser) {
	for peer := range p.Env.World {
		if peer != p.Env.Rank && (p.Env.Rank == 0 || peer == 0) {
			conns = append(conns, p.host.Stream(peer))
		}
	}
	return conns
}

// End closes the process's part of the job, which ended with err. If only the MPI library does not
// end, it warns: the work is done.
func (p *Place) End(err error) error {
	closed := p.Close()
	unended, ok := errors.AsType[*mpi.UnendedError](closed)
	if !ok {
		return errors.Join(err, closed)
	}
	if err == nil {
		fmt.Fprintf(p.Stderr, "warning: %v; all is done and written, but the launcher may report a failure\n", unended)
	}
	return err
}

// messages is the transport over the launcher's MPI. If the job fails, each process prints the last
// operations of its rank.
type messages struct {
	process *mpi.Process
	stderr  io.Writer
}

// Copies returns true: data of other ranks are copied into memory of the transport.
func (m messages) Copies() bool { return true }

func (m messages) Join(mesh []graph.Axis, local []int, timeout time.Duration, warn func(string)) (platform.Joined, error) {
	w, err := m.process.Join(mesh, len(local), mpi.Options{Timeout: timeout, Warn: warn})
	if err != nil {
		return nil, err
	}
	// At once: when the first process ends, the launcher may end the others.
	w.OnError(func(err error) {
		fmt.Fprintf(m.stderr, "the job ends with: %v\nthe last operations of %s", err, w.Flight(3))
	})
	return messageWorld{w}, nil
}

// OutsideBytes returns the memory of a process for the library, its messages and the relay.
func (messages) OutsideBytes(processes, each int) int64 {
	bytes := mpi.OutsideBytes(processes, each)
	if relay.Relayed() {
		bytes += relay.Bytes
	}
	return bytes
}

// messageWorld is a World whose arenas may be in any memory.
type messageWorld struct{ *mpi.World }

func (messageWorld) Map(int) func(graph.Space, int64) ([]byte, func() error, error) { return nil }

// Work lends this process's rank to rank 0, and sends it this process's settings, or refused, the
// reason why they were rejected. If ctx is canceled because this process was interrupted, rank 0
// ends the job as if it had been interrupted itself.
func (p *Place) Work(ctx context.Context, ask *Asked, refused error) (err error) {
	if err := p.join(ask.C.Timeout); err != nil { // a signal may end it: it could wait for a process that never starts
		return err
	}
	ask.C.Threads = p.threads(ask.C.Threads)
	if refused == nil {
		ask.C.LocalRanks = max(ask.C.LocalRanks, 1)
		ask.C.Ranks = p.Env.World * ask.C.LocalRanks
		refused = cmp.Or(ask.L.Follow(ask.Fs, ask.C, io.Discard), ask.Of(context.Background(), p.Job))
	}
	p.Job.Refused = refused
	defer cli.Shelter()() // rank 0 decides when it ends
	defer func() {
		// In a failed job over MPI every process has printed its error. A process that rank 0 still
		// told to end must not exit with success.
		if m, ok := p.Job.Transport.(messages); ok && err == nil && m.process.Failed() {
			err = &cli.SilentError{Err: cli.Fault(errors.New("the job failed"))}
		}
		err = p.End(err)
	}()
	runtime.GOMAXPROCS(ask.C.Threads + spareProcs)
	for again := true; again && err == nil; {
		again, err = p.lend(ctx)
	}
	return err
}

// lend lends the rank until the run ends; true: the remaining processes continue.
func (p *Place) lend(ctx context.Context) (again bool, err error) {
	defer context.AfterFunc(ctx, func() {
		defer crash.Guard()
		p.Job.Links[0].Interrupt()
	})()
	planned, undo := host.MakeRoom()
	defer undo()
	p.Job.Planned = planned
	began, err := spillway.Work(context.Background(), p.Job, func(text string) { fmt.Fprintln(p.Stderr, "warning:", cli.Flagged(text)) })
	switch {
	case err == nil || began:
	case p.host != nil && p.Job.Roll.Folder != "": // a rank was lost during the start
	case errors.Is(err, comm.ErrTimeout): // rank 0 is stuck or stopped
		return false, cli.Fault(err)
	default:
		return false, &cli.SilentError{Err: err} // rank 0 did not start the run and printed the reason
	}
	if p.host == nil {
		return false, cli.Fault(err)
	}
	return p.follow(context.Background(), cli.Fault(err))
}

// Carries rejects a given transport that cannot connect ranks on a device.
func (p *Place) Carries(device string) error {
	onGPU := strings.EqualFold(device, "cuda")
	switch {
	case p.Transport == cluster.NCCL && !onGPU && p.asked != cluster.NCCL:
		return p.Env.CPUsCantMeet()
	case p.asked == cluster.NCCL && !onGPU:
		return fmt.Errorf("--transport nccl joins ranks on GPUs, and --device is %s: leave --transport out, or add --device cuda", device)
	case onGPU && (p.asked == cluster.SHM || p.asked == cluster.MPI):
		return fmt.Errorf("--transport %s joins CPU ranks; those of --device cuda exchange over NCCL: leave --transport out", p.asked)
	}
	return nil
}

// accepts rejects a configuration that cannot run over the job's processes. asked tells whether
// --ranks was given.
func (p *Place) accepts(c *spillway.Config, asked bool) error {
	if p.Transport == cluster.InProc {
		return nil
	}
	if err := p.Carries(c.Device); err != nil {
		return err
	}
	if !asked {
		return nil
	}
	return p.Env.CheckRanks(c.Ranks, max(c.LocalRanks, 1))
}

// TurnAway ends a job whose command line rank 0 rejects before the processes are connected. Over
// MPI it connects them first: the others are already in MPI_Init, which does not return without
// this process, and MPICH's launcher leaves them there if a process ends that has not called it.
func (p *Place) TurnAway(err error) error {
	if p.Transport != cluster.MPI || p.join(0) != nil {
		return err
	}
	p.Job.Dismiss(err)
	return p.End(err)
}

// Lead joins the processes and makes c, which accepts has checked, a run over them.
func (p *Place) Lead(c *spillway.Config) error {
	if err := p.join(c.Timeout); err != nil {
		return err
	}
	c.Threads = p.threads(c.Threads)
	runtime.GOMAXPROCS(c.Threads + spareProcs)
	*c = c.Over(p.Job)
	p.Job.Fastest.Ranks = c.Ranks
	for _, f := range calibration.Fastest(p.Transport, c.Ranks) {
		p.Job.Fastest.Choices = append(p.Job.Fastest.Choices, algo.Choice{Op: comm.Op(f.Op), Bytes: f.Bytes, Algorithm: algo.Name(f.Algorithm)})
	}
	return nil
}

// sharedMemory is the transport between the processes of one host.
type sharedMemory struct{ job *shm.Job }

// Apart tells the launcher why the processes could not connect.
func (s sharedMemory) Apart(err error) { s.job.Fail(0, err) }

func (s sharedMemory) Join(mesh []graph.Axis, local []int, timeout time.Duration, warn func(string)) (platform.Joined, error) {
	return s.job.Join(mesh, local, shm.Options{Timeout: timeout, Warn: warn})
}
