package relay

import (
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/internal/crash"
)

var relayed bool

// Relayed reports whether the process is the rank of a relay.
func Relayed() bool { return relayed }

// Run must be called first in main. In a process that hydra started it becomes the relay, and
// returns the exit status once the rank has ended. In the rank it starts to watch for the end of
// the relay and returns false. Anywhere else it only returns false.
func Run() (status int, relay bool) {
	proxy, err := strconv.Atoi(os.Getenv(needs[0]))
	if err != nil || slices.ContainsFunc(needs, func(name string) bool { return os.Getenv(name) == "" }) {
		return 0, false
	}
	if by := os.Getenv(Variable); by != "" {
		relayed = true
		_ = os.Unsetenv(Variable) // not for this process's children
		watch(by, proxy)
		return 0, false
	}
	path, err := os.Executable()
	if err != nil {
		return 0, false
	}
	signals := make(chan os.Signal, 16)
	cli.Catch(signals, syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2)
	rank, err := os.StartProcess(path, os.Args, &os.ProcAttr{
		Env:   append(os.Environ(), fmt.Sprintf("%s=%d", Variable, os.Getpid())),
		Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}, // the rank inherits the proxy's socket unchanged
		Sys:   &syscall.SysProcAttr{Setpgid: true},
	})
	if err != nil {
		signal.Reset()
		return 0, false // without a relay this process is the rank
	}
	runtime.GOMAXPROCS(1)
	runtime.LockOSThread()                                                   // the next line acts on this thread, which must not end
	_ = unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(syscall.SIGTERM), 0, 0, 0) // sent if the proxy is killed
	ended := make(chan *os.ProcessState)
	go func() {
		defer crash.Guard()
		state, _ := rank.Wait()
		ended <- state
	}()
	for {
		select {
		case s := <-signals:
			_ = rank.Signal(s) // the rank may have ended
		case state := <-ended:
			return endAs(state), true
		}
	}
}

// endAs ends the process with the signal that ended the rank, or returns the rank's exit status.
// The proxy's socket stays open until then: the proxy kills all processes as soon as the last
// holder of one closes it before MPI_Finalize.
func endAs(state *os.ProcessState) int {
	if state == nil {
		return cli.ExitFault
	}
	if by, ok := state.Sys().(syscall.WaitStatus); ok && by.Signaled() {
		_ = unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}) // the rank has already written any core dump
		byDefault := [4]uint64{}                             // a struct sigaction of zeros: SIG_DFL
		_, _, _ = unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(by.Signal()), uintptr(unsafe.Pointer(&byDefault)), 0, 8, 0, 0)
		_ = syscall.Kill(os.Getpid(), by.Signal())
		time.Sleep(time.Second) // until the signal ends the process
		return cli.ExitFault
	}
	return state.ExitCode()
}

// watch sends this process a SIGTERM when the launcher ends, so that the job saves and ends, or
// ends at once if it has been saving for a while. If the proxy killed the relay but still runs,
// another rank was lost: the launcher ends the job, so watch sends SIGKILL.
func watch(relay string, proxy int) {
	socket, err := unix.FcntlInt(uintptr(proxy), unix.F_DUPFD_CLOEXEC, 3) // a copy, as MPI_Finalize closes the original
	if err != nil {
		socket = -1 // poll ignores it
	}
	go func() {
		defer crash.Guard()
		for strconv.Itoa(os.Getppid()) == relay {
			time.Sleep(lookEvery)
		}
		end := syscall.SIGKILL
		if hungUp(socket, ending) {
			end = syscall.SIGTERM
		}
		_ = syscall.Kill(os.Getpid(), end)
	}()
}

// hungUp reports whether the other end of a socket closes within a time.
func hungUp(socket int, within time.Duration) bool {
	for late := time.Now().Add(within); ; {
		fds := []unix.PollFd{{Fd: int32(socket), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(fds, max(0, int(time.Until(late).Milliseconds())))
		if err != unix.EINTR {
			return n > 0
		}
	}
}
