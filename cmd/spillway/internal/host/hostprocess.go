// Package host makes this process ready for plans and runs: its processors and its heap.
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

// extraProcs gives the runtime more processors (GOMAXPROCS) than computing
// threads while a run uses the disk tier. A worker whose read or write returns
// needs one to go on; where kernels have them all it waits for up to a time
// slice of 10 ms. Beside computing cores the tier moves a quarter more with two
// more, and kernels get no less (benchmarks/disk, -busy).
type extraProcs struct {
	mu    sync.Mutex
	users int
}

const procsForDisk = 2

var DiskProcs extraProcs

// BesideDisk gives the processors until after is called.
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

// planningHeap lets the heap grow further before it is collected while something plans
// many configurations: what lives is a few programs, and each plan leaves megabytes
// behind, so that by default a third of a search's time is the collector's. It takes up
// to some 100 MB. GOGC, where it is set, holds.
type planningHeap struct {
	mu    sync.Mutex
	users int
	was   int
}

// Garbage on the heap in percent of what lives, as of debug.SetGCPercent. A run's heap is beside its
// arenas, and little is allocated during a step.
const (
	planningPercent = 400
	runningPercent  = 25
)

var PlanHeap planningHeap

// Acquire is for who calls what it returns afterwards.
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

// collectAt sets the percent, but in a process that has asked for more garbage than planning leaves,
// such as a test's: there it stays.
func collectAt(percent int) (was int) {
	if was = debug.SetGCPercent(percent); was > planningPercent {
		debug.SetGCPercent(was)
	}
	return was
}

// MakeRoom gives this process what a planned run needs of it: processors beside the
// disk tier, and the memory that planning left on the heap, which would stay resident
// beside the arenas, that nothing has touched so far. From then on little garbage is left on the
// heap, unless GOGC is set. undo takes the processors back, and leaves the heap to its old rule.
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

// NewTrainer is start, which makes a trainer, in a process that is made ready for it. closeAll
// closes the trainer.
func NewTrainer[T io.Closer](ctx context.Context, c config.Config, start func(context.Context, config.Config) (T, error)) (t T, closeAll func() error, err error) {
	c.Threads = c.ComputeThreads() // before the runtime has more processors than that
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

// Executable is the path of this program, also where no /proc is mounted.
func Executable() (string, error) {
	path, err := os.Executable()
	if err != nil {
		return exec.LookPath(os.Args[0])
	}
	return path, nil
}
