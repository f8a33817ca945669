package processes

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// jobsEnv is set in the environment of every process that the tests start.
const jobsEnv = "SPILLWAY_TEST_JOBS"

// alive stays open until this process ends.
var alive *os.File

func init() { endOrphans = watchOrphans }

// watchOrphans starts a shell that kills the remaining processes of the tests when this process has
// ended, also after a timeout or a signal. A parent death signal is no alternative: it is sent when
// the starting thread ends, and does not reach grandchildren.
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
