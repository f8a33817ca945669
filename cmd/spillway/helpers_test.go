package main

import (
	"os"
	"testing"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/clitest"
	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
)

func TestMain(m *testing.M) { os.Exit(ownworld.Run(m)) }

var (
	tinyRun   = clitest.TinyRun
	tinyWith  = clitest.TinyWith
	testdata  = clitest.Testdata
	edited    = clitest.Edited
	writeFile = clitest.WriteFile
	tree      = clitest.Tree
	saved     = clitest.Saved
	shaOf     = clitest.ShaOf
	readLines = clitest.ReadLines
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
