package processes

import "github.com/spillway-ml/spillway/cmd/spillway/internal/clitest"

var (
	tinyRun      = clitest.TinyRun
	tinyWith     = clitest.TinyWith
	testdata     = clitest.Testdata
	edited       = clitest.Edited
	writeFile    = clitest.WriteFile
	tree         = clitest.Tree
	saved        = clitest.Saved
	shaLine      = clitest.ShaLine
	shaOf        = clitest.ShaOf
	readLines    = clitest.ReadLines
	requirePage  = clitest.RequirePage
	planned      = clitest.Planned
	unwrapped    = clitest.Unwrapped
	progressLine = clitest.ProgressLine
)

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
