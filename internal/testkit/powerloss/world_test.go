package powerloss

import (
	"os"
	"testing"

	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
)

// orderVar in the environment makes the test binary a process of a job, which obeys.
const orderVar = "SPILLWAY_TEST_POWERLOSS_ORDER"

// obeys runs such a process; nil where there are no jobs over processes.
var obeys func(order string) (status int)

func TestMain(m *testing.M) {
	if order := os.Getenv(orderVar); order != "" && obeys != nil {
		os.Exit(obeys(order))
	}
	os.Exit(ownworld.Run(m))
}
