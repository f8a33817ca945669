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

// Relayed tells whether the process is a relay's rank.
func Relayed() bool { return relayed }

// Run is called first of all. In a process that hydra has started it is the relay, and returns
// the exit status once the rank has ended. Anywhere else it returns false, and in the rank it
// has the end of the relay watched.
func Run() (status int, relay bool) {
	proxy, err := strconv.Atoi(os.Getenv(needs[0]))
	if err != nil || slices.ContainsFunc(needs, func(name string) bool { return os.Getenv(name) == "" }) {
		return 0, false
	}
	if by := os.Getenv(Variable); by != "" {
		relayed = true
		_ = os.Unsetenv(Variable) // it is not for what this process starts
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
		Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}, // the proxy's socket is inherited as it is
		Sys:   &syscall.SysProcAttr{Setpgid: true},
	})
	if err != nil {
		signal.Reset()
		return 0, false // it is the rank itself
	}
	runtime.GOMAXPROCS(1)
	runtime.LockOSThread()                                                   // the next line is about a thread, which must stay
	_ = unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(syscall.SIGTERM), 0, 0, 0) // of a proxy that somebody has killed
	ended := make(chan *os.ProcessState)
	go func() {
		defer crash.Guard()
		state, _ := rank.Wait()
		ended <- state
	}()
	for {
		select {
		case s := <-signals:
			_ = rank.Signal(s) // it may have ended
		case state := <-ended:
			return endAs(state), true
		}
	}
}

// endAs ends the process as the rank has ended, where that was by a signal; otherwise it
// returns the rank's exit status. The proxy's socket stays open until then: the proxy kills all
// processes as soon as the last holder of one closes it before MPI_Finalize.
func endAs(state *os.ProcessState) int {
	if state == nil {
		return cli.ExitFault
	}
	if by, ok := state.Sys().(syscall.WaitStatus); ok && by.Signaled() {
		_ = unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}) // the rank has written one, if any
		byDefault := [4]uint64{}                             // a struct sigaction of zeros: SIG_DFL
		_, _, _ = unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(by.Signal()), uintptr(unsafe.Pointer(&byDefault)), 0, 8, 0, 0)
		_ = syscall.Kill(os.Getpid(), by.Signal())
		time.Sleep(time.Second) // it ends us
		return cli.ExitFault
	}
	return state.ExitCode()
}

// watch makes the end of the launcher a SIGTERM: the job saves and ends, or, where it has
// been saving for a while, ends at once. If the proxy has killed the relay and goes on, another
// rank has been lost: the launcher ends the job, and this process as well.
func watch(relay string, proxy int) {
	socket, err := unix.FcntlInt(uintptr(proxy), unix.F_DUPFD_CLOEXEC, 3) // MPI_Finalize closes the proxy's
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

// hungUp tells whether the other end of a socket is closed within a time.
func hungUp(socket int, within time.Duration) bool {
	for late := time.Now().Add(within); ; {
		fds := []unix.PollFd{{Fd: int32(socket), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(fds, max(0, int(time.Until(late).Milliseconds())))
		if err != unix.EINTR {
			return n > 0
		}
	}
}
