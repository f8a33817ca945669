// Package launch starts the processes of a job on this host, and gives each of them access to the
// job. When the launcher ends, for any reason, its processes are killed.
package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
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
	// Grace is how long the other processes may take to end after the first has ended.
	// Default 30 s.
	Grace time.Duration
	// Stdout and Stderr receive the ranks' output: rank 0's unchanged, lines of other ranks
	// prefixed with their rank.
	Stdout, Stderr io.Writer
	// CPUs are the processors to which the ranks are bound, in equal consecutive shares, if
	// there is at least one for each rank; empty: ranks are not bound.
	CPUs []int
}

// End describes the end of a job.
type End struct {
	// Status is rank 0's exit status; 3 if a rank was lost; or 130 if a SIGINT, SIGTERM or
	// SIGHUP, from any sender, ended a rank before it handled signals.
	Status int
	// Lost says which process was killed or crashed first and how; "" if none was. LostRanks
	// is the number of such processes.
	Lost      string
	LostRanks int
	// Steps is the number of steps that the job had done, as rank 0 reported (shm.Job.SetSteps).
	Steps int
	// Failure is the error that the job's processes recorded, and Flight the last operations
	// of each; "" if nothing failed.
	Failure, Flight string
}

// LostAny says whether the job ended because it lost a rank, and not because a rank found an error
// itself, such as a divergence.
func (e End) LostAny() bool { return e.Lost != "" || e.Status == LostStatus && e.Failure != "" }

// Exit statuses of a job that lost a rank, and of one that a signal ended.
const (
	LostStatus        = 3
	InterruptedStatus = 130
)

// threads returns the number of computing threads of each process.
func (o *Options) threads(cpus int) int { return max(1, cpus/o.Ranks) }

// share returns the CPUs of a rank.
func (o *Options) share(rank int) []int {
	if len(o.CPUs) < o.Ranks {
		return nil
	}
	from, to := rank*len(o.CPUs)/o.Ranks, (rank+1)*len(o.CPUs)/o.Ranks
	return o.CPUs[from:to]
}

// environment returns the environment of a process, with the variables that describe the job.
func (o *Options) environment(base []string, rank, threads int) []string {
	// Make a crash of Go's runtime, even before the program's first line, end in SIGABRT. Its exit
	// status 2 would mean "does not fit".
	if !slices.ContainsFunc(base, func(v string) bool { return strings.HasPrefix(v, "GOTRACEBACK=") }) {
		base = append(base, "GOTRACEBACK=crash")
	}
	return append(base, fmt.Sprintf("%s=%d", cluster.LaunchRank, rank), fmt.Sprintf("%s=%d", cluster.LaunchWorld, o.Ranks),
		fmt.Sprintf("%s=%d", cluster.LaunchThreads, threads))
}

// firstFile is the number of the first file that a process inherits.
const firstFile = 3

// Inherited returns the job's shared memory and the streams that a process inherits from launch.
// Rank 0 has a stream to each other rank, in their order; another rank has one to rank 0.
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

// Run starts the job and returns when all its processes have ended. It forwards signals to rank 0,
// which leads the job. When ctx is done, it kills all processes.
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

// wait is the state of a running job while its processes end.
type wait struct {
	left    int
	codes   []int // exit statuses by process; −1 if a signal ended it
	name    func(process int) string
	lost    string
	gone    int  // processes that were killed by others or crashed
	killed  bool // this process has killed ranks, or one was interrupted
	asked   bool // the job was interrupted by a signal before there was anything to save
	timeout <-chan time.Time
}

// ended records the end of a process.
func (w *wait) ended(rank int, s *os.ProcessState, grace time.Duration) {
	w.left--
	w.codes[rank] = s.ExitCode()
	by, ok := s.Sys().(syscall.WaitStatus)
	early := ok && by.Signaled() && slices.Contains(interrupts, by.Signal()) // before the process handled signals
	// Once the ranks are connected, only rank 0 ends when it is interrupted.
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

// end returns how the job ended: with rank 0's status, unless another rank's end explains more.
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
