package planning_test

import (
	"flag"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/clitest"
)

var (
	tinyWith    = clitest.TinyWith
	testdata    = clitest.Testdata
	edited      = clitest.Edited
	writeFile   = clitest.WriteFile
	requirePage = clitest.RequirePage
	planned     = clitest.Planned
	unwrapped   = clitest.Unwrapped
)

var update = flag.Bool("update", false, "rewrite the files that tests compare with")

// result is the outcome of a command line.
type result struct {
	status         int
	stdout, stderr string
}

// command runs a command line in this process.
func command(args ...string) result {
	status, stdout, stderr := clitest.Command(args...)
	return result{status, stdout, stderr}
}
