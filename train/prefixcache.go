package train

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/dgraph-io/ristretto/v2"
	"github.com/dustin/go-humanize/english"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/run"
)

// openPrefixCache allocates the cache, if the run has one. The disk tier's folder must be open.
func (t *Trainer) openPrefixCache() error {
	c := t.cfg
	if c.FrozenCache.Bytes == 0 {
		return nil
	}
	p := t.plan.Program
	row := p.Buf(p.Port(graph.PortPrefix)).Bytes() / int64(c.Batch)
	windows := t.train.sampler.Windows()
	pc := &prefixCache{row: row, slots: min(c.FrozenCache.Bytes*int64(c.Ranks)/row, windows+1), slotOf: make([]int32, windows+1)}
	if pc.slots == 0 {
		return config.Refuse("Config.FrozenCache %s: %s for each of %s cannot hold one row of %s",
			c.FrozenCache, plan.Bytes(c.FrozenCache.Bytes), english.Plural(c.Ranks, "rank", ""), plan.Bytes(row))
	}
	if pc.slots < windows && c.Warn != nil {
		c.Warn(fmt.Sprintf("Config.FrozenCache holds %d of the data's %d rows; a step skips the frozen layers only where all its rows are there (%s would hold them all)",
			pc.slots, windows, plan.Bytes(windows*row/int64(c.Ranks)+row)))
	}
	if c.FrozenCache.Tier == graph.Disk {
		err := t.roomOnDisk(pc.slots * row)
		if err != nil {
			return err
		}
		if pc.disk, err = t.disk.CreateUncached(c.Ranks, pc.slots*row, 0); err != nil {
			return fmt.Errorf("Config.FrozenCache: %w", err)
		}
		t.prefix = pc
		return pc.openHot(&c.Config, t.plan.Layout.Spaces[graph.Disk].Peak)
	}
	pc.ctx = cpu.New(c.Ranks, cpu.Options{})
	t.prefix = pc
	arena, err := pc.ctx.Alloc(graph.Host, pc.slots*row)
	if err != nil {
		return fmt.Errorf("Config.FrozenCache: %w", err)
	}
	pc.mem, err = pc.ctx.HostBytes(device.Ptr{Arena: arena, Len: pc.slots * row})
	return err
}

// openHot makes a memory cache from the part of Config.DiskCache that the ranks' files on the
// disk tier, of disk bytes each, leave free. It uses half of that: the Go heap may grow to
// twice what is in use.
func (pc *prefixCache) openHot(c *config.Config, disk int64) (err error) {
	room := (c.DiskCache - min(c.DiskCache, disk)) * int64(c.Ranks) / 2
	rows := min(room/pc.row, pc.slots)
	if rows == 0 {
		return nil
	}
	pc.hot, err = ristretto.NewCache(&ristretto.Config[int64, []byte]{
		NumCounters: 10 * pc.slots, MaxCost: rows * pc.row, BufferItems: 64, IgnoreInternalCost: true,
	})
	if err != nil {
		return fmt.Errorf("Config.FrozenCache: rows in memory: %w", err)
	}
	return nil
}

func (pc *prefixCache) close() error {
	var errs []error
	if pc.hot != nil {
		pc.hot.Close()
	}
	if pc.ctx != nil {
		errs = append(errs, pc.ctx.Close())
	}
	if pc.disk != nil {
		errs = append(errs, pc.disk.Close())
	}
	return errors.Join(errs...)
}

func (pc *prefixCache) window(b *batches, step, micro, rank, row int) int64 {
	if b.sampler.IsPadding(step, micro, rank, row) {
		return b.sampler.Windows()
	}
	return b.sampler.Start(step, micro, rank, row) / int64(b.sampler.Seq())
}

// has tells whether every row of the step is cached.
func (pc *prefixCache) has(b *batches, c *config.Config, step int) bool {
	if pc.used == 0 {
		return false
	}
	for rank := range c.Ranks {
		for micro := range b.sampler.Share(step, rank) {
			for row := range c.Batch {
				if pc.slotOf[pc.window(b, step, micro, rank, row)] == 0 {
					return false
				}
			}
		}
	}
	return true
}

// take caches the rows of a micro-batch that are not cached yet, while there is room. Ranks
// call it concurrently.
func (pc *prefixCache) take(b *batches, step, micro, rank int, rows []byte) error {
	for r := range int64(len(rows)) / pc.row {
		w := pc.window(b, step, micro, rank, int(r))
		pc.mu.Lock()
		room := pc.slotOf[w] == 0 && pc.used < pc.slots
		var slot int64
		if room {
			slot = pc.used
			pc.used++
			pc.slotOf[w] = int32(slot + 1)
		}
		pc.mu.Unlock()
		if !room {
			continue
		}
		from := rows[r*pc.row : (r+1)*pc.row]
		if pc.disk == nil {
			copy(pc.mem[slot*pc.row:], from)
		} else if err := pc.disk.Store(from, slot*pc.row).Run(); err != nil {
			return fmt.Errorf("cache of the frozen layers: %w", err)
		}
	}
	return nil
}

// give fills a micro-batch with its rows, all of which are cached.
func (pc *prefixCache) give(b *batches, step, micro, rank int, rows []byte) error {
	for r := range int64(len(rows)) / pc.row {
		slot := int64(pc.slotOf[pc.window(b, step, micro, rank, int(r))]) - 1
		to := rows[r*pc.row : (r+1)*pc.row]
		if pc.disk == nil {
			copy(to, pc.mem[slot*pc.row:])
		} else if err := pc.load(to, slot); err != nil {
			return fmt.Errorf("cache of the frozen layers: %w", err)
		}
	}
	return nil
}

// load reads a row of the disk tier, from hot if it is there. Rows never change once they are
// written.
func (pc *prefixCache) load(to []byte, slot int64) error {
	if pc.hot == nil {
		return pc.disk.Load(to, slot*pc.row).Run()
	}
	if row, ok := pc.hot.Get(slot); ok {
		copy(to, row)
		return nil
	}
	if err := pc.disk.Load(to, slot*pc.row).Run(); err != nil {
		return err
	}
	pc.hot.Set(slot, bytes.Clone(to), pc.row)
	return nil
}

func (pc *prefixCache) traffic() device.Traffic {
	if pc == nil || pc.disk == nil {
		return device.Traffic{}
	}
	return pc.disk.Traffic()
}

// keepPrefix caches the frozen layers' output that a finished run of a phase has computed, for
// its micro-batches from micro on.
func (t *Trainer) keepPrefix(r *run.Rank, step, micro int) error {
	if t.prefix == nil {
		return nil
	}
	return t.eachPrefix(r, step, micro, func(slot int, rows []byte) error { return t.prefix.take(t.train, step, micro+slot, r.Index, rows) })
}

// givePrefix writes the rows of the next micro-batches to where the program copies them from.
func (t *Trainer) givePrefix(r *run.Rank, step, micro int) error {
	return t.eachPrefix(r, step, micro, func(slot int, rows []byte) error { return t.prefix.give(t.train, step, micro+slot, r.Index, rows) })
}

// eachPrefix calls visit with a rank's host memory for the frozen layers' output of each
// micro-batch of a phase, from micro on.
func (t *Trainer) eachPrefix(r *run.Rank, step, micro int, visit func(slot int, rows []byte) error) error {
	for slot := range min(len(t.inputs), t.train.sampler.Share(step, r.Index)-micro) {
		rows, err := r.Exec.HostBytes(t.inputs[slot][graph.PortPrefix])
		if err == nil {
			err = visit(slot, rows)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
