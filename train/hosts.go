package train

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/dustin/go-humanize/english"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/run"
)

// hostMemory is what a host of the job has.
type hostMemory struct {
	host  string // "": this machine
	bytes int64  // that its processes may use; 0: not known
	ranks int    // how many share it
}

// share is each rank's part; 0: not known.
func (m hostMemory) share() int64 { return m.bytes / int64(max(m.ranks, 1)) }

func (m hostMemory) String() string {
	where := "this machine"
	if m.host != "" {
		where = "host " + m.host
	}
	return fmt.Sprintf("%s of %s for %s", plan.Bytes(m.bytes), where, english.Plural(m.ranks, "rank", ""))
}

// greet hears from the other processes what they are, before anything is planned:
// they must be alike, and the least that a host has is what a plan may use. It is the
// configuration with what they said.
func greet(c config.Config) (config.Config, error) {
	j := jobOf(&c)
	if j == nil {
		return c, nil
	}
	if !j.greeted {
		if err := j.hear(&c); err != nil {
			return c, err
		}
		j.greeted = true
	}
	c.PerHost = j.perHost
	if j.disk != nil && (c.DiskMemory == 0 || c.DiskMemory > j.disk.share()) {
		c.DiskMemory = j.disk.share()
	}
	return c, nil
}

// hear takes what all processes say of themselves.
func (j *Job) hear(c *config.Config) error {
	self := j.hello()
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
	for _, h := range all {
		if diff := self.Differs(h); diff != "" {
			return errors.New("the processes of a job must be alike: " + diff)
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
		all[i+1].Disk = h.Disk
	}
	j.disk = leastOf(all, c.LocalRanks, func(h run.Hello) int64 { return h.Disk })
	return nil
}

// leastOf is the host with the least of something for each of its ranks, of processes
// of so many ranks each; nil where none tells.
func leastOf(all []run.Hello, each int, of func(run.Hello) int64) (least *hostMemory) {
	byName := map[string]int{}
	for _, h := range all {
		byName[h.Host] += each
	}
	for _, h := range all {
		m := hostMemory{h.Host, of(h), h.LocalRanks}
		if m.ranks == 0 { // no launcher says
			m.ranks = byName[h.Host]
		}
		if m.bytes > 0 && (least == nil || m.share() < least.share()) {
			least = &m
		}
	}
	return least
}

// machine is the memory that the run's arenas come out of where it is scarcest.
func machine(c *config.Config) hostMemory {
	if jobOf(c) != nil && jobOf(c).least != nil {
		return *jobOf(c).least
	}
	return hostMemory{bytes: machineMemory(), ranks: hostRanks(c)}
}

// inMachine lists the spaces whose arenas lie in the machine's own memory.
func inMachine(c *config.Config) []graph.Space {
	if strings.EqualFold(c.Device, "cuda") {
		return []graph.Space{graph.Host}
	}
	return []graph.Space{graph.Device, graph.Host}
}

// FitHere is Fit for a run on this machine, or of a job on its hosts: what a rank has
// in the machine's own memory, in all spaces together, is also within its share of the
// host with the least. What that takes of caps is in Fitted.Caps.
func FitHere(ctx context.Context, cfg config.Config, fixed Fixed, rows int, hw Hardware) (*Fitted, error) {
	return request{Config: cfg}.fitHere(ctx, fixed, rows, hw)
}

func (q request) fitHere(ctx context.Context, fixed Fixed, rows int, hw Hardware) (_ *Fitted, err error) {
	if q.Config, err = greet(q.Config); err != nil {
		return nil, err
	}
	best, err := q.fit(ctx, fixed, rows, hw)
	if err != nil {
		return nil, err
	}
	machine := machine(&q.Config)
	needs := inMemory(best.Plan, inMachine(&q.Config))
	if machine.bytes == 0 || needs <= machine.share() {
		return best, nil
	}
	var first error
	for _, caps := range q.splits(ctx, machine.share()) {
		q.DeviceMemory, q.HostMemory = caps[graph.Device], caps[graph.Host]
		found, err := q.fit(ctx, fixed, rows, hw)
		if err == nil {
			found.Caps = caps
			found.Reasons = append(found.Reasons, fmt.Sprintf("within %s; the fastest without that limit takes %s a rank there", machine, plan.Bytes(needs)))
			return found, nil
		}
		var none *NothingFits
		if !errors.As(err, &none) {
			return nil, err
		}
		none.Machine = machine.String()
		if first == nil {
			first = none
		}
	}
	return nil, first
}

// inMemory is what a rank of a plan takes of some spaces, with what is outside its arenas.
func inMemory(p *plan.Plan, spaces []graph.Space) (sum int64) {
	for _, sp := range spaces {
		sum += p.Config.Outside[sp] + p.Layout.Spaces[sp].Peak
	}
	return sum
}

// splits are the caps by which device and host memory may come out of one share of the
// machine's, tried in order. What leaves the device for the host frees nothing where
// both are the machine's memory, so the host first gets as little as it can do with,
// and more only for what passes through it to disk.
func (c request) splits(ctx context.Context, share int64) (list [][graph.NumSpaces]int64) {
	least := func(asked, n int64) int64 {
		if asked > 0 {
			n = min(n, asked)
		}
		return max(n, 1)
	}
	if len(inMachine(&c.Config)) == 1 {
		return [][graph.NumSpaces]int64{{graph.Device: c.DeviceMemory, graph.Host: least(c.HostMemory, share)}}
	}
	host := int64(0) // what is outside grows with the operations that compute again
	for _, again := range []string{"none", "full"} {
		plain := c
		plain.Offload, plain.Recompute = "", again
		if p, err := plain.plan(ctx); err == nil {
			host = max(host, inMemory(p, []graph.Space{graph.Host}))
		}
	}
	hosts := []int64{host}
	for _, part := range []int64{8, 4, 2} {
		hosts = append(hosts, share/part)
	}
	for _, host := range hosts {
		if 0 < host && host < share {
			list = append(list, [graph.NumSpaces]int64{graph.Device: least(c.DeviceMemory, share-host), graph.Host: least(c.HostMemory, host)})
		}
	}
	return list
}
