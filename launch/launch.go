// Package launch starts the processes of a job on this host, and is what such a
// process finds of it. Its processes end with it, however it ends.
package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/comm/shm"
)

// Options of a launch.
type Options struct {
	Ranks   int
	Program string   // path of the executable
	Args    []string // its arguments, without its name
	Dir     string
	// Grace is how long the others have to end by themselves after the first has.
	// Default 30 s.
	Grace time.Duration
	// Stdout and Stderr receive what the ranks write: rank 0's as it is, the lines
	// of the others with their rank in front.
	Stdout, Stderr io.Writer
	// CPUs are what the ranks are bound to, in equal shares of neighbours, where
	// there is at least one for each; empty: they are not bound.
	CPUs []int
}

// End is how a job ended.
type End struct {
	// Status is rank 0's exit status, 3 where a rank was lost, or 130 where a SIGINT, SIGTERM
	// or SIGHUP ended a rank that did not deal with signals yet, whoever sent it.
	Status int
	// Lost says which rank ended otherwise than by itself; "" for none. LostRanks is
	// how many processes did.
	Lost      string
	LostRanks int
	// Steps is how many the job had done, as rank 0 has told (shm.Job.SetSteps).
	Steps int
	// Failure is what the job's processes found, and Flight the last operations of
	// each; "" where nothing failed.
	Failure, Flight string
}

// LostAny tells whether the job ended because it lost a rank: not so one that has
// found an error of its own, such as a divergence.
func (e End) LostAny() bool { return e.Lost != "" || e.Status == LostStatus && e.Failure != "" }

// Exit statuses of a job that lost a rank, and of one that a signal ended.
const (
	LostStatus        = 3
	InterruptedStatus = 130
)

// threads is how many computing threads each process has to itself.
func (o *Options) threads(cpus int) int { return max(1, cpus/o.Ranks) }

// share is the CPUs of a rank.
func (o *Options) share(rank int) []int {
	if len(o.CPUs) < o.Ranks {
		return nil
	}
	from, to := rank*len(o.CPUs)/o.Ranks, (rank+1)*len(o.CPUs)/o.Ranks
	return o.CPUs[from:to]
}

// environment is what a process finds of the job.
func (o *Options) environment(base []string, rank, threads int) []string {
	return append(base, fmt.Sprintf("%s=%d", cluster.LaunchRank, rank), fmt.Sprintf("%s=%d", cluster.LaunchWorld, o.Ranks),
		fmt.Sprintf("%s=%d", cluster.LaunchThreads, threads))
}

// firstFile is the number of the first file that a process inherits.
const firstFile = 3

// Inherited is what a process of a launch was given: the job's shared memory, and
// its streams: rank 0's to the others in their order, another's to rank 0.
func Inherited(e cluster.Env) (*shm.Job, []io.ReadWriteCloser, error) {
	if e.Source != cluster.Launch {
		return nil, nil, errors.New("not started by spillway launch")
	}
	var files []*os.File
	for i := range e.World + 1 {
		files = append(files, os.NewFile(uintptr(firstFile+i), "shared memory"))
	}
	j, err := shm.Attach(files)
	if err != nil {
		return nil, nil, fmt.Errorf("the environment says a process of spillway launch (%s=%d), but what it gives its processes is not there: %w", cluster.LaunchRank, e.Rank, err)
	}
	streams := 1
	if e.Rank == 0 {
		streams = e.World - 1
	}
	var conns []io.ReadWriteCloser
	for i := range streams {
		c, err := stream(firstFile + e.World + 1 + i)
		if err != nil {
			return nil, nil, fmt.Errorf("the stream to another rank: %w", err)
		}
		conns = append(conns, c)
	}
	return j, conns, nil
}

// Run starts the job and returns when all its processes have ended. A value on
// signals is passed on to rank 0, which leads the job; when ctx is done, all are
// killed.
func Run(ctx context.Context, o Options, signals <-chan os.Signal) (End, error) {
	if o.Ranks < 1 {
		return End{}, fmt.Errorf("-n %d: at least 1 rank is needed", o.Ranks)
	}
	if o.Grace <= 0 {
		o.Grace = 30 * time.Second
	}
	return run(ctx, o, signals)
}

// interrupts are the signals that ask a job to end.
var interrupts = []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP}

// wait is what is left of a job that runs: processes end one by one.
type wait struct {
	left    int
	codes   []int // exit statuses by process; −1 where a signal ended it
	name    func(process int) string
	lost    string
	gone    int  // processes that ended otherwise than by themselves
	killed  bool // by us
	asked   bool // a signal ended a rank that had nothing to save yet
	timeout <-chan time.Time
}

// ended takes the end of a process.
func (w *wait) ended(rank int, s *os.ProcessState, grace time.Duration) {
	w.left--
	w.codes[rank] = s.ExitCode()
	by, ok := s.Sys().(syscall.WaitStatus)
	early := ok && by.Signaled() && slices.Contains(interrupts, by.Signal()) // before it dealt with signals
	// Once the ranks have met, only rank 0 ends by itself when it is interrupted.
	if early || rank > 0 && s.ExitCode() == InterruptedStatus {
		w.asked, w.killed = true, true
	}
	if s.ExitCode() < 0 && !w.killed {
		w.gone++
	}
	if s.ExitCode() < 0 && !w.killed && w.lost == "" {
		w.lost = fmt.Sprintf("%s (process %d): %s", w.name(rank), s.Pid(), s)
	}
	if w.timeout == nil && w.left > 0 {
		w.timeout = time.After(grace)
	}
}

// end is how it all ended: as rank 0, unless that says nothing of what another
// rank came to.
func (w *wait) end() End {
	e := End{Status: w.codes[0], Lost: w.lost, LostRanks: w.gone}
	if w.asked {
		e.Status = InterruptedStatus
		return e
	}
	if e.Status < 0 || e.Status == 0 && slices.ContainsFunc(w.codes, func(c int) bool { return c != 0 }) {
		e.Status = LostStatus
	}
	return e
}
