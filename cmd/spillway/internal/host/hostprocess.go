// Package host prepares this process for plans and runs: its processors and its heap.
package host

import (
	"context"
	"io"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"sync"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/pages"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
)

// extraProcs gives the runtime more processors (GOMAXPROCS) than compute threads while a run uses
// the disk tier. A worker whose read or write returns needs one to continue; if kernels use them
// all, it waits for up to a time slice of 10 ms. With two more processors the tier moves a quarter
// more data while all cores compute, and the kernels are not slower (benchmarks/disk, -busy).
type extraProcs struct {
	mu    sync.Mutex
	users int
}

const procsForDisk = 2

var DiskProcs extraProcs

// BesideDisk adds the processors until after is called.
func (e *extraProcs) BesideDisk() (after func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.users++; e.users == 1 {
		runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + procsForDisk)
	}
	return e.release
}

func (e *extraProcs) release() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.users--; e.users == 0 {
		runtime.GOMAXPROCS(max(1, runtime.GOMAXPROCS(0)-procsForDisk))
	}
}

// planningHeap lets the heap grow further before a collection while many configurations are
// planned. Few programs are live, but each plan leaves megabytes of garbage, so by default the
// collector takes a third of a search's time. It costs up to about 100 MB. A GOGC in the
// environment overrides it.
type planningHeap struct {
	mu    sync.Mutex
	users int
	was   int
}

// Garbage on the heap in percent of the live data, as in debug.SetGCPercent. A run's heap is
// separate from its arenas, and a step allocates little on it.
const (
	planningPercent = 400
	runningPercent  = 25
)

var PlanHeap planningHeap

// Acquire raises the limit until release is called.
func (h *planningHeap) Acquire() (release func()) {
	if os.Getenv("GOGC") != "" {
		return func() {}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.users++; h.users == 1 {
		h.was = collectAt(planningPercent)
	}
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.users--; h.users == 0 {
			debug.SetGCPercent(h.was)
		}
	}
}

// collectAt sets the percentage. It keeps one above planningPercent, which a test's process may
// have set.
func collectAt(percent int) (was int) {
	if was = debug.SetGCPercent(percent); was > planningPercent {
		debug.SetGCPercent(was)
	}
	return was
}

// MakeRoom prepares this process for a planned run. planned adds processors for the disk tier and
// frees the memory that planning left on the heap; it would stay resident beside the arenas, which
// are still untouched. It also limits garbage on the heap from then on, unless GOGC is set. undo
// restores the processors and the heap's previous limit.
func MakeRoom() (planned func(*plan.Plan), undo func()) {
	pages.Leave()
	onDisk, percent := false, 0
	planned = func(p *plan.Plan) {
		if p.Layout.Spaces[graph.Disk].Peak > 0 || p.Config.Outside[graph.Disk] > 0 {
			onDisk = true
			DiskProcs.BesideDisk()
		}
		if os.Getenv("GOGC") == "" && percent == 0 {
			percent = collectAt(runningPercent)
		}
		if percent <= planningPercent {
			debug.FreeOSMemory()
		}
		pages.Leave()
	}
	return planned, func() {
		if percent > 0 {
			debug.SetGCPercent(percent)
			percent = 0
		}
		if onDisk {
			onDisk = false
			DiskProcs.release()
		}
	}
}

// NewTrainer calls start, which makes a trainer, after preparing the process for it. closeAll
// closes the trainer.
func NewTrainer[T io.Closer](ctx context.Context, c config.Config, start func(context.Context, config.Config) (T, error)) (t T, closeAll func() error, err error) {
	c.Threads = c.ComputeThreads() // computed before the runtime gets more processors
	planned, undo := MakeRoom()
	told := c.Planned
	c.Planned = func(p *plan.Plan) {
		if told != nil {
			told(p)
		}
		planned(p)
	}
	if t, err = start(ctx, c); err != nil {
		undo()
		return t, nil, err
	}
	return t, func() error {
		defer undo()
		return t.Close()
	}, nil
}

// Executable returns the path of this program, even if /proc is not mounted.
func Executable() (string, error) {
	path, err := os.Executable()
	if err != nil {
		return exec.LookPath(os.Args[0])
	}
	return path, nil
}
