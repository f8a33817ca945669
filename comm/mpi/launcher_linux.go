package mpi

import (
	"os"
	"syscall"
	"time"

	"github.com/spillway-ml/spillway/internal/crash"
)

// windowVar is how many seconds Open MPI's library lets go by before it ends a process that has
// lost its launcher, by _exit(2); by default 1. A program that has not saved by then loses its
// last steps: see outlive.
const windowVar = "PMIX_MCA_pmix_event_caching_window"

// patience has Open MPI's library, which is not open yet, wait for 5 minutes there, unless the
// user has set another time.
func patience() error {
	if _, set := os.LookupEnv(windowVar); set {
		return nil
	}
	return os.Setenv(windowVar, "300")
}

// outlive makes the end of the launcher a SIGTERM. Open MPI's ends at once at a second signal:
// it neither passes that on nor kills its processes. Messages between them need no launcher.
func outlive() {
	launcher := os.Getppid()
	go func() {
		defer crash.Guard()
		for os.Getppid() == launcher {
			time.Sleep(beatEvery)
		}
		_ = syscall.Kill(os.Getpid(), syscall.SIGTERM)
	}()
}
