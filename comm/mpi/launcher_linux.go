package mpi

import (
	"os"
	"syscall"
	"time"

	"github.com/spillway-ml/spillway/internal/crash"
)

// windowVar names the environment variable for the number of seconds after which Open MPI's
// library ends a process that has lost its launcher, by _exit(2). The default is 1. A program
// that has not saved a checkpoint by then loses its last steps: see outlive.
const windowVar = "PMIX_MCA_pmix_event_caching_window"

// patience sets windowVar to 5 minutes unless the user has set it. It must be called before
// Open MPI's library is opened.
func patience() error {
	if _, set := os.LookupEnv(windowVar); set {
		return nil
	}
	return os.Setenv(windowVar, "300")
}

// launcherEvery is the interval at which outlive looks for the launcher.
const launcherEvery = 100 * time.Millisecond

// outlive sends this process a SIGTERM when its launcher ends. Open MPI's launcher ends at
// once at a second signal, without forwarding it and without killing its processes. Messages
// between the processes still work without a launcher.
func outlive() {
	launcher := os.Getppid()
	go func() {
		defer crash.Guard()
		for os.Getppid() == launcher {
			time.Sleep(launcherEvery)
		}
		_ = syscall.Kill(os.Getpid(), syscall.SIGTERM)
	}()
}
