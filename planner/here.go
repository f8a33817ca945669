package planner

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
)

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
	return Request{Config: cfg}.FitHere(ctx, fixed, rows, hw)
}

func (q Request) FitHere(ctx context.Context, fixed Fixed, rows int, hw Hardware) (_ *Fitted, err error) {
	best, err := q.Fit(ctx, fixed, rows, hw)
	if err != nil {
		return nil, err
	}
	machine := MachineOf(&q.Config)
	needs := InMemory(best.Plan, inMachine(&q.Config))
	if machine.Holds(needs) {
		return best, nil
	}
	var first error
	for _, caps := range q.splits(ctx, machine.Share()) {
		q.DeviceMemory, q.HostMemory = caps[graph.Device], caps[graph.Host]
		found, err := q.Fit(ctx, fixed, rows, hw)
		if err == nil {
			found.Caps = caps
			found.Reasons = append(found.Reasons, fmt.Sprintf("within %s; the fastest without that limit takes %s a rank there", machine, plan.Bytes(needs)))
			return found, nil
		}
		none, ok := errors.AsType[*NothingFits](err)
		if !ok {
			return nil, err
		}
		none.Machine = machine.String()
		first = cmp.Or[error](first, none)
	}
	return nil, first
}

// InMemory is what a rank of a plan takes of some spaces, with what is outside its arenas.
func InMemory(p *plan.Plan, spaces []graph.Space) (sum int64) {
	for _, sp := range spaces {
		sum += p.Config.Outside[sp] + p.Layout.Spaces[sp].Peak
	}
	return sum
}

// splits are the caps by which device and host memory may come out of one share of the
// machine's, tried in order. What leaves the device for the host frees nothing where
// both are the machine's memory, so the host first gets as little as it can do with,
// and more only for what passes through it to disk.
func (c Request) splits(ctx context.Context, share int64) (list [][graph.NumSpaces]int64) {
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
		if p, err := plain.Plan(ctx); err == nil {
			host = max(host, InMemory(p, []graph.Space{graph.Host}))
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
