package spillway

import (
	"fmt"
	"runtime"
	"sync"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/plan"
)

// openDisk opens the folder of the disk tier, where there is one, before the
// ranks make their files in it.
func (t *Trainer) openDisk() error {
	c := &t.cfg
	disk := t.plan.Layout.Spaces[graph.Disk].Peak
	if c.FrozenCache.Tier == graph.Disk {
		disk += c.FrozenCache.Bytes
	}
	if c.Disk == "" {
		if disk > 0 {
			return fmt.Errorf("the plan has %s on disk a rank and no folder for it: give --disk DIR", plan.Bytes(disk))
		}
		return nil
	}
	folder, err := store.Open(c.Disk, store.Options{Cache: c.DiskCache, Warn: c.Warn, Wrap: c.wrapDisk})
	if err != nil {
		return fmt.Errorf("--disk %s: %w", c.Disk, err)
	}
	t.disk = folder
	if disk > 0 {
		diskProcs.acquire()
		t.procs = true
	}
	return nil
}

func (t *Trainer) closeDisk() error {
	if t.procs {
		diskProcs.release()
		t.procs = false
	}
	if t.disk == nil {
		return nil
	}
	err := t.disk.Close()
	t.disk = nil
	return err
}

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

var diskProcs extraProcs

func (e *extraProcs) acquire() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.users++; e.users == 1 {
		runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + procsForDisk)
	}
}

func (e *extraProcs) release() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.users--; e.users == 0 {
		runtime.GOMAXPROCS(max(1, runtime.GOMAXPROCS(0)-procsForDisk))
	}
}

// procs is how many processors the runtime has for computing.
func (e *extraProcs) procs() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := runtime.GOMAXPROCS(0)
	if e.users > 0 {
		n -= procsForDisk
	}
	return max(1, n)
}

// memoryOptions adds to a CPU context's options where its host and disk memory
// come from.
func (t *Trainer) memoryOptions(o *cpu.Options) {
	o.Warn = t.cfg.Warn
	o.RequirePinned = t.cfg.RequirePinned
	o.Pin = usesHostTier(t.plan)
	if t.disk != nil {
		o.Disk = t.disk.Create
	}
}

// usesHostTier tells whether a plan keeps more in host memory than what every
// run has there, inputs and the staging of its states: only then is locking
// worth a warning where it is refused.
func usesHostTier(p *plan.Plan) bool {
	if p.Layout.Spaces[graph.Disk].Peak > 0 {
		return true
	}
	for class := range graph.NumClasses {
		switch class {
		case graph.Inputs, graph.Communication, graph.Padding:
		default:
			if p.Layout.Spaces[graph.Host].ClassPeak[class] > 0 {
				return true
			}
		}
	}
	return false
}

func (t *Trainer) diskTraffic() (sum device.Traffic) {
	for _, r := range t.ranks {
		d := r.exec.DiskTraffic()
		sum.Read += d.Read
		sum.Written += d.Written
	}
	d := t.prefix.traffic()
	sum.Read += d.Read
	sum.Written += d.Written
	return sum
}
