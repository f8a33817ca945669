package spillway

import (
	"fmt"

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
	if c.Disk == "" {
		if disk > 0 {
			return fmt.Errorf("the plan has %s on disk a rank and no folder for it: give --disk DIR", plan.Bytes(disk))
		}
		return nil
	}
	if host := t.plan.Layout.Spaces[graph.Host].Peak; c.DiskCache > 0 && c.HostMemory > 0 && c.DiskCache > c.HostMemory-host {
		return fmt.Errorf("--disk-cache %d: of --host-memory %d the plan leaves %d bytes", c.DiskCache, c.HostMemory, max(0, c.HostMemory-host))
	}
	folder, err := store.Open(c.Disk, store.Options{Cache: c.DiskCache, Warn: c.Warn, Wrap: c.wrapDisk})
	if err != nil {
		return fmt.Errorf("--disk %s: %w", c.Disk, err)
	}
	t.disk = folder
	return nil
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
	return sum
}
