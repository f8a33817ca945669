package job

import (
	"errors"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/run"
)

// Greet exchanges descriptions with the other processes before anything is planned. They must be
// alike. It returns c limited to the memory and disk space of the host that has the least.
func Greet(c config.Config) (config.Config, error) {
	j := Of(&c)
	if j == nil {
		return c, nil
	}
	if !j.greeted {
		if err := j.hear(&c); err != nil {
			return c, j.apart(err)
		}
		j.greeted = true
	}
	c = j.within(c)
	c.PerHost = j.perHost
	if j.disk != nil && (c.DiskMemory == 0 || c.DiskMemory > j.disk.Share()) {
		c.DiskMemory = j.disk.Share()
	}
	return c, nil
}

// apart gives the transport the error if the processes do not meet, so that the launcher of the
// processes can report it.
func (j *Job) apart(err error) error {
	if t, ok := j.Transport.(interface{ Apart(error) }); ok && errors.Is(err, comm.ErrTimeout) {
		t.Apart(err)
	}
	return err
}

// hear receives all processes' descriptions of themselves.
func (j *Job) hear(c *config.Config) error {
	self := j.Hello()
	self.Disk = store.Free(c.Disk)
	all := []run.Hello{self.In(c.LocalRanks)}
	for _, l := range j.Links {
		h, err := l.Welcome()
		if err != nil {
			return err
		}
		all = append(all, h.In(c.LocalRanks))
	}
	j.heard = true
	self = all[0]
	if err := j.alike(c, all); err != nil {
		return err
	}
	for _, h := range all {
		for sp, limit := range h.Caps {
			if limit > 0 && (j.caps[sp] == 0 || limit < j.caps[sp]) {
				j.caps[sp] = limit
			}
		}
	}
	if self.Aligned() {
		j.perHost = self.LocalRanks
	}
	for _, h := range all {
		if h.LocalRanks != self.LocalRanks || !h.Aligned() {
			j.perHost = 0
		}
	}
	j.least = leastOf(all, c.LocalRanks, func(h run.Hello) int64 { return h.Memory })
	if c.Disk == "" {
		return nil
	}
	for i, l := range j.Links {
		if err := l.Assign(run.Task{Disk: c.Disk}); err != nil {
			return err
		}
		h, err := l.Welcome()
		if err != nil {
			return err
		}
		h = h.In(c.LocalRanks)
		all[i+1].Disk = h.Disk
		if h.Refused != "" {
			return j.refusal(h, h.Refused)
		}
		if h.Unwritable != "" && j.unwritable == nil {
			j.unwritable = func() error { return j.refusal(h, h.Unwritable) }
		}
	}
	j.disk = leastOf(all, c.LocalRanks, func(h run.Hello) int64 { return h.Disk })
	return nil
}

// leastOf returns the host with the least of a resource for each of its ranks, given the ranks per
// process. It is nil if no process reports the resource.
func leastOf(all []run.Hello, each int, of func(run.Hello) int64) (least *config.HostMemory) {
	byName := map[string]int{}
	for _, h := range all {
		byName[h.Host] += each
	}
	for _, h := range all {
		m := config.HostMemory{Host: h.Host, Bytes: of(h), Ranks: h.LocalRanks}
		if m.Ranks == 0 { // no launcher reported the host's number of ranks
			m.Ranks = byName[h.Host]
		}
		if m.Bytes > 0 && (least == nil || m.Share() < least.Share()) {
			least = &m
		}
	}
	return least
}
