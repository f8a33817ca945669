package train

import (
	"fmt"
	"os"
	"testing"

	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
	"github.com/spillway-ml/spillway/planner"
)

// asMember is main of a process that a test has launched; nil: this is none.
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

// briefly is a CPU whose searches end early: a test of what a run does with a placement needs
// one that fits, not the fastest.
func briefly(threads int) planner.Hardware {
	hw := planner.CPUHardware(threads)
	hw.Effort = 100
	return hw
}
