//go:build !linux

package shm

import (
	"errors"
	"os"
	"runtime"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/graph"
)

var errSystem = errors.New("shared memory between processes needs Linux (memfd, futex); this is " + runtime.GOOS)

// Options of a World.
type Options struct {
	Timeout time.Duration
	Warn    func(string)
}

// Job can't be made on this system.
type Job struct{}

// World can't be made on this system.
type World struct{}

// Create returns an error.
func Create(int) (*Job, error) { return nil, errSystem }

// Attach returns an error.
func Attach([]*os.File) (*Job, error) { return nil, errSystem }

// Processes returns none.
func (*Job) Processes() (processes, each int) { return 0, 0 }

// SetPID does nothing.
func (*Job) SetPID(process, pid int) {}

// Where returns nothing.
func (*Job) Where(int) string { return "" }

// Fail returns false.
func (*Job) Fail(int, error) bool { return false }

// SetSteps does nothing.
func (*Job) SetSteps(int) {}

// Steps returns none.
func (*Job) Steps() int { return 0 }

// Files returns none.
func (*Job) Files() []*os.File { return nil }

// Join returns an error.
func (*Job) Join([]graph.Axis, []int, Options) (*World, error) { return nil, errSystem }

// Flight returns nothing: there are no jobs in shared memory on this system.
func (*Job) Flight(int) string { return "" }

// Failure returns nothing, as Flight does.
func (*Job) Failure() string { return "" }

// Close does nothing.
func (*Job) Close() error { return nil }

// Groups returns an error.
func (*World) Groups(int) (map[int]comm.Group, error) { return nil, errSystem }

// Abort does nothing.
func (*World) Abort(error) {}

// OnError does nothing.
func (*World) OnError(func(error)) {}

// Err returns an error.
func (*World) Err() error { return errSystem }

// Map refuses.
func (*World) Map(int) func(graph.Space, int64) ([]byte, func() error, error) {
	return func(graph.Space, int64) ([]byte, func() error, error) { return nil, nil, errSystem }
}

// Close does nothing.
func (*World) Close() error { return nil }
