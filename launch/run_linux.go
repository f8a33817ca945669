package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"

	"github.com/dustin/go-humanize/english"
	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/comm/shm"
	"github.com/spillway-ml/spillway/internal/crash"
)

// stream returns a connection over an inherited socket.
func stream(fd int) (io.ReadWriteCloser, error) {
	f := os.NewFile(uintptr(fd), "stream")
	defer f.Close()
	return net.FileConn(f)
}

// CPUs lists the processors that this process may run on.
func CPUs() []int {
	var set unix.CPUSet
	if unix.SchedGetaffinity(0, &set) != nil {
		return nil
	}
	var list []int
	for i := range len(set) * 64 {
		if set.IsSet(i) {
			list = append(list, i)
		}
	}
	return list
}

// bind binds this thread, and processes that it starts, to CPUs; with none it does nothing.
func bind(cpus []int) {
	if len(cpus) == 0 {
		return
	}
	var set unix.CPUSet
	for _, c := range cpus {
		set.Set(c)
	}
	_ = unix.SchedSetaffinity(0, &set) // errors are ignored: ranks also run unbound
}

// process is the operating system process of one or more ranks.
type process struct {
	*exec.Cmd
	lines *lines // output of a process other than the first; nil for the first
}

type ended struct {
	rank  int
	state *os.ProcessState
}

func run(ctx context.Context, o Options, signals <-chan os.Signal) (End, error) {
	// Pdeathsig kills the children when the thread that started them ends, so keep the thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	job, err := shm.Create(o.Ranks)
	if err != nil {
		return End{}, err
	}
	defer job.Close()
	list, err := startAll(&o, job)
	kill := func() {
		for _, p := range list {
			_ = p.Process.Kill()
		}
	}
	ends := make(chan ended)
	for rank, p := range list {
		go func() {
			defer crash.Guard()
			_ = p.Wait() // the result is in ProcessState
			if p.lines != nil {
				p.lines.flush()
			}
			ends <- ended{rank, p.ProcessState}
		}()
	}
	if err != nil {
		kill()
		for range list {
			<-ends
		}
		return End{}, err
	}
	w := wait{left: o.Ranks, codes: make([]int, o.Ranks), name: func(process int) string { return ranksOf(job, process) }}
	for w.left > 0 {
		select {
		case e := <-ends:
			w.ended(e.rank, e.state, o.Grace)
			switch {
			case w.asked:
				kill()
			case !e.state.Success():
				wake(list)
			}
		case s := <-signals:
			forward(list, s)
		case <-w.timeout:
			w.killed = true
			w.gone += w.left
			if w.lost == "" {
				w.lost = fmt.Sprintf("%s did not end within %v of the first", english.Plural(w.left, "rank", ""), o.Grace)
			}
			kill()
			w.timeout = nil
		case <-ctx.Done():
			w.killed = true
			kill()
			ctx = context.Background()
		}
	}
	end := w.end()
	end.Steps = job.Steps()
	if w.asked {
		return end, nil
	}
	if end.Failure = job.Failure(); end.Status == LostStatus && (end.Failure != "" || end.Lost != "") {
		end.Flight = job.Flight(3)
	}
	return end, nil
}

// forward forwards a signal: stop and continue to all processes, others to rank 0, which the others
// follow.
func forward(list []*process, s os.Signal) {
	switch s {
	case syscall.SIGTSTP:
		for _, p := range list {
			_ = p.Process.Signal(syscall.SIGSTOP)
		}
		stopHere()
		for _, p := range list {
			_ = p.Process.Signal(syscall.SIGCONT)
		}
	default:
		_ = list[0].Process.Signal(s)
	}
}

// stopHere stops this process until somebody continues it. The calling thread must be locked: the
// signal is sent to that thread, so the process stops before the call returns. Another thread could
// receive a signal to the process, and this thread would continue meanwhile.
func stopHere() {
	_ = unix.Tgkill(unix.Getpid(), unix.Gettid(), unix.SIGSTOP)
}

// wake continues stopped ranks after the job has ended, so that they notice that and end.
func wake(list []*process) {
	for _, p := range list {
		_ = p.Process.Signal(syscall.SIGCONT)
	}
}

// ranksOf returns the names of a process's ranks, once it has reported how many it has.
func ranksOf(job *shm.Job, process int) string {
	_, each := job.Processes()
	if each == 1 {
		return fmt.Sprintf("rank %d", process)
	}
	return fmt.Sprintf("ranks %d to %d", process*each, (process+1)*each-1)
}

// startAll starts the ranks. After an error the result has the processes that were started.
func startAll(o *Options, job *shm.Job) (list []*process, err error) {
	own := CPUs()
	defer bind(own)
	threads := o.threads(len(own))
	streams := make([][]*os.File, o.Ranks) // by rank, the sockets that the process inherits
	defer func() {
		for _, files := range streams {
			for _, f := range files {
				err = errors.Join(err, f.Close())
			}
		}
	}()
	for rank := 1; rank < o.Ranks; rank++ {
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return nil, fmt.Errorf("launch: %w", os.NewSyscallError("socketpair", err))
		}
		streams[0] = append(streams[0], os.NewFile(uintptr(fds[0]), "stream"))
		streams[rank] = append(streams[rank], os.NewFile(uintptr(fds[1]), "stream"))
	}
	merged := newMerger(o.Stderr)
	for rank := range o.Ranks {
		p := &process{Cmd: exec.Command(o.Program, o.Args...)}
		p.Dir = o.Dir
		p.Env = o.environment(os.Environ(), rank, threads)
		p.ExtraFiles = slices.Concat(job.Files(), streams[rank])
		p.Stdin = strings.NewReader("") // not /dev/null, which an empty chroot lacks
		// A separate process group: signals of the terminal reach the process only through launch.
		p.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
		if rank == 0 {
			p.Stdout, p.Stderr = o.Stdout, merged
			if f, ok := o.Stderr.(*os.File); ok {
				p.Stderr = f // directly: the process sees a terminal, and its output keeps its order
			}
		} else {
			p.lines = merged.rank(func() string { return ranksOf(job, rank) })
			p.Stdout, p.Stderr = p.lines, p.lines
		}
		bind(o.share(rank))
		if err := p.Start(); err != nil {
			return list, fmt.Errorf("launch: rank %d: %w", rank, err)
		}
		job.SetPID(rank, p.Process.Pid)
		list = append(list, p)
	}
	return list, nil
}
