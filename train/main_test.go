package train

import (
	"fmt"
	"os"
	"testing"

	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
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
