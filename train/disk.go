package train

import (
	"fmt"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
)

// openDisk opens the folder of the disk tier, if the plan uses one, before the ranks make their
// files in it.
func (t *Trainer) openDisk() error {
	c := t.cfg
	disk := t.plan.Layout.Spaces[graph.Disk].Peak
	if c.FrozenCache.Tier == graph.Disk {
		disk += c.FrozenCache.Bytes
	}
	if c.Disk == "" {
		if disk > 0 {
			return config.RefuseField("Disk", "the plan has %s on disk a rank and no folder for it: give Config.Disk DIR", plan.Bytes(disk))
		}
		return nil
	}
	o := planner.DiskOptions(&c.Config)
	o.Cache, o.Warn, o.Wrap = c.DiskCache, c.Warn, c.wrapDisk
	folder, err := store.Open(c.Disk, o)
	if err != nil {
		return fmt.Errorf("Config.Disk %s: %w", c.Disk, err)
	}
	t.disk = folder
	return nil
}

func (t *Trainer) closeDisk() error {
	if t.disk == nil {
		return nil
	}
	err := t.disk.Close()
	t.disk = nil
	return err
}

func (t *Trainer) diskTraffic() (sum device.Traffic) {
	sum = t.ranks.DiskTraffic()
	d := t.prefix.traffic()
	sum.Read += d.Read
	sum.Written += d.Written
	return sum
}
