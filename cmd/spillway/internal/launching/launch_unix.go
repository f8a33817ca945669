//go:build unix

package launching

import (
	"os"
	"syscall"
)

// jobSignals are the signals that launch relays to its job.
var jobSignals = []os.Signal{os.Interrupt, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGTSTP}

// ends reports whether a signal asks the job to end.
func ends(s os.Signal) bool { return s != syscall.SIGTSTP }
