package train

import (
	"cmp"
	"errors"
	"fmt"
	"math"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/train/job"
)

// openDisk opens the folder of the disk tier, if the plan uses one, before the ranks create their
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
	if disk == 0 {
		return nil // the folder need not be writable
	}
	return cmp.Or(canMake("Config.Disk", c.Disk), t.roomOnDisk(0), t.job.Unwritable())
}

// lookAtDisk returns, in a process that does not lead, the errors that openDisk would return. The
// leader needs them before it gives the processes a task.
func lookAtDisk(dir string) (refused, unwritable error) {
	folder, err := store.Open(dir, store.Options{})
	if err != nil {
		return fmt.Errorf("Config.Disk %s: %w", dir, err), nil
	}
	return folder.Close(), canMake("Config.Disk", dir)
}

// leastDisk explains the refusal of a plan that exceeds a host's free space for the disk tier. In
// that case Config.DiskMemory is the host's share, and not a cap that the user gave.
func (t *Trainer) leastDisk(err error) error {
	d, rank := t.job.Disk(), t.plan.Layout.Spaces[graph.Disk].Peak
	if d == nil || rank <= d.Share() || t.cfg.DiskMemory != d.Share() {
		return err
	}
	needs := rank * int64(max(d.Ranks, 1))
	room := func(err error) error {
		return &noRoom{fmt.Sprintf("does not fit: the disk tier takes %s, and free in Config.Disk %s are %s; "+
			"free %s there, or give a folder of another file system",
			plan.Bytes(needs), t.cfg.Disk, d, plan.Bytes(needs-d.Bytes)), err}
	}
	if r, ok := errors.AsType[*planner.Refusal](err); ok {
		return r.Because(room(r.Cause))
	}
	return room(err)
}

// noRoom replaces the text of a plan's refusal.
type noRoom struct {
	text    string
	refusal error
}

func (e *noRoom) Error() string { return e.text }
func (e *noRoom) Unwrap() error { return e.refusal }

// roomOnDisk refuses the disk tier's files of this process's ranks, and another file of more bytes,
// if the file system has no room for them. If the free space is unknown, it refuses nothing.
func (t *Trainer) roomOnDisk(more int64) error {
	c := t.cfg
	room, known := filesys.RoomAt(filesys.System, c.Disk)
	n, rank := int64(len(job.World(&c.Config).Local)), t.plan.Layout.Spaces[graph.Disk].Peak
	if rank = min(rank, math.MaxInt64-store.Page); rank%store.Page != 0 {
		rank += store.Page - rank%store.Page
	}
	if left := room.Most - more; !known || left >= 0 && rank <= left/n {
		return nil
	}
	needs := more + n*min(rank, (math.MaxInt64-more)/n)
	return config.OfKind(fmt.Errorf("does not fit: the disk tier takes %s, and the file system of Config.Disk %s has %s free; free %s there, or give a folder of another one",
		plan.Bytes(needs), c.Disk, plan.Bytes(room.Most), plan.Bytes(needs-room.Most)), plan.ErrDoesNotFit)
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
