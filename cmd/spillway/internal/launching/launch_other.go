//go:build !unix

package launching

import (
	"os"
	"syscall"
)

// jobSignals are the signals that launch relays to its job.
var jobSignals = []os.Signal{os.Interrupt, syscall.SIGTERM}

// ends reports whether a signal asks the job to end.
func ends(os.Signal) bool { return true }
