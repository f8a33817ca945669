package train

import (
	"fmt"
	"os"
	"testing"

	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
	"github.com/spillway-ml/spillway/planner"
)

// asMember is the main function of a process launched by a test, or nil in other processes.
var asMember func() error

func TestMain(m *testing.M) {
	if asMember == nil {
		os.Exit(ownworld.Run(m))
	}
	if err := asMember(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// briefly returns CPU hardware with a short search. Tests of a run with a placement need one that
// fits, not the fastest.
func briefly(threads int) planner.Hardware {
	hw := planner.CPUHardware(threads)
	hw.Effort = 100
	return hw
}
