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

// Create refuses.
func Create(int) (*Job, error) { return nil, errSystem }

// Attach refuses.
func Attach([]*os.File) (*Job, error) { return nil, errSystem }

// Processes returns none.
func (*Job) Processes() (processes, each int) { return 0, 0 }

// SetPID does nothing.
func (*Job) SetPID(process, pid int) {}

// Where tells nothing.
func (*Job) Where(int) string { return "" }

// Fail refuses.
func (*Job) Fail(int, error) bool { return false }

// SetSteps does nothing.
func (*Job) SetSteps(int) {}

// Steps returns none.
func (*Job) Steps() int { return 0 }

// Files returns none.
func (*Job) Files() []*os.File { return nil }

// Join refuses.
func (*Job) Join([]graph.Axis, []int, Options) (*World, error) { return nil, errSystem }

// Flight is empty: there are no jobs in shared memory here.
func (*Job) Flight(int) string { return "" }

// Failure is empty, as Flight is.
func (*Job) Failure() string { return "" }

// Close does nothing.
func (*Job) Close() error { return nil }

// Groups refuses.
func (*World) Groups(int) (map[int]comm.Group, error) { return nil, errSystem }

// Abort does nothing.
func (*World) Abort(error) {}

// OnError does nothing.
func (*World) OnError(func(error)) {}

// Err refuses.
func (*World) Err() error { return errSystem }

// Map refuses.
func (*World) Map(int) func(graph.Space, int64) ([]byte, func() error, error) {
	return func(graph.Space, int64) ([]byte, func() error, error) { return nil, nil, errSystem }
}

// Close does nothing.
func (*World) Close() error { return nil }
