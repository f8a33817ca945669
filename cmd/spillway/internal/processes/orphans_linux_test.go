package processes

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// jobsEnv is in the environment of every process that the tests start.
const jobsEnv = "SPILLWAY_TEST_JOBS"

// alive is held open until this process ends.
var alive *os.File

func init() { endOrphans = watchOrphans }

// watchOrphans starts a shell that kills what the tests have left when this process has ended,
// also where a timeout of the tests or a signal ends it. A death signal would not do: it comes
// when the thread ends that has started the process, and reaches no process further down.
func watchOrphans() error {
	mark := fmt.Sprint(jobsEnv, "=", os.Getpid(), ".", time.Now().UnixNano())
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	const script = `read x; for p in /proc/[0-9]*; do grep -qs "$0" $p/environ && kill -9 ${p#/proc/}; done`
	watcher := exec.Command("/bin/sh", "-c", script, mark)
	watcher.Stdin, watcher.SysProcAttr = r, &syscall.SysProcAttr{Setsid: true} // no terminal's interrupt ends it
	if err := watcher.Start(); err != nil {
		return err
	}
	alive = w
	return os.Setenv(jobsEnv, mark[len(jobsEnv)+1:])
}
