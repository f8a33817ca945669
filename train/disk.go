package train

import (
	"fmt"
	"runtime"
	"sync"

	"github.com/spillway-ml/spillway/device"
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

func (t *Trainer) diskTraffic() (sum device.Traffic) {
	sum = t.ranks.DiskTraffic()
	d := t.prefix.traffic()
	sum.Read += d.Read
	sum.Written += d.Written
	return sum
}
