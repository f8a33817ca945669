package planner

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
)

// inMachine lists the spaces whose arenas are in the machine's main memory.
func inMachine(c *config.Config) []graph.Space {
	if strings.EqualFold(c.Device, "cuda") {
		return []graph.Space{graph.Host}
	}
	return []graph.Space{graph.Device, graph.Host}
}

// FitHere is Fit for a run on this machine, or for a job on its hosts. It also limits a rank's main
// memory, over all spaces, to its share of the host with the least. Fitted.Caps are the caps that
// this adds.
func FitHere(ctx context.Context, cfg config.Config, fixed Fixed, rows int, hw Hardware) (*Fitted, error) {
	return Request{Config: cfg}.FitHere(ctx, fixed, rows, hw)
}

// FitHere is the function FitHere for a request.
func (q Request) FitHere(ctx context.Context, fixed Fixed, rows int, hw Hardware) (*Fitted, error) {
	best, err := q.Fit(ctx, fixed, rows, hw)
	if err != nil {
		return nil, err
	}
	machine := MachineOf(&q.Config)
	needs := InMemory(best.Plan, inMachine(&q.Config))
	if machine.Holds(needs) {
		return best, nil
	}
	found, nearest, err := q.within(ctx, machine, fixed, rows, hw)
	if nearest != nil {
		return nil, nearest
	}
	if found != nil {
		found.Reasons = append(found.Reasons,
			fmt.Sprintf("within %s; the fastest without that limit takes %s a rank there", machine, plan.Bytes(needs)))
	}
	return found, err
}

// within is Fit within a rank's share of the machine's memory. It divides the share between device
// and host if both are in main memory. If nothing fits, nearest has the plan that needs the least
// of the share.
func (q Request) within(ctx context.Context, machine config.HostMemory, fixed Fixed, rows int, hw Hardware) (
	found *Fitted, nearest *NothingFits, err error,
) {
	at, share, both := q, machine.Share(), len(inMachine(&q.Config)) > 1
	list, finer := q.splits(ctx, share)
	least := int64(math.MaxInt64) // bytes of the share that the plan of nearest needs
	for i := 0; i < len(list); i++ {
		at.DeviceMemory, at.HostMemory = list[i][graph.Device], list[i][graph.Host]
		if i >= finer {
			if ok, _, err := at.feasible(ctx, fixed, rows, hw); err != nil {
				return nil, nil, err
			} else if !ok {
				continue
			}
		}
		found, err := at.Fit(ctx, fixed, rows, hw)
		if err == nil {
			found.Caps = list[i]
			return found, nil, nil
		}
		none, ok := errors.AsType[*NothingFits](err)
		if !ok {
			return nil, nil, err
		}
		none.Machine = machine.String()
		takes := int64(math.MaxInt64)
		if none.Smallest != nil {
			takes = InMemory(none.Smallest.Plan, inMachine(&q.Config))
		}
		if nearest != nil && takes >= least {
			continue
		}
		nearest, least = none, takes
		if takes <= share && i < finer && both { // it fits if the share is divided to suit it
			list = slices.Insert(list, finer, q.split(share, InMemory(none.Smallest.Plan, []graph.Space{graph.Host})))
			finer++
		}
	}
	return nil, nearest, nil
}

// TooSmall adds to the error for a plan that the machine's memory cannot hold a configuration that
// fits there, if a short search finds one. It proposes a disk tier only if nothing else fits.
func (r *Resolved) TooSmall(ctx context.Context, cause error, hw Hardware) error {
	machine := MachineOf(&r.Config)
	hw.Effort = refusalEffort
	for _, disk := range []string{r.Disk, newDisk} {
		if r.Inference || disk != r.Disk && r.Disk != "" {
			break
		}
		q := r.Request
		q.Disk, hw.Budget = disk, NewBudget(4*refusalEffort)
		for _, rows := range []int{0, r.StepRows()} {
			all := q
			all.DeviceMemory, all.HostMemory = atMost(q.DeviceMemory, machine.Share()), atMost(q.HostMemory, machine.Share())
			if ok, _, err := all.feasible(ctx, Fixed{}, rows, hw); err != nil || !ok {
				continue
			}
			found, _, err := q.within(ctx, machine, Fixed{}, rows, hw)
			if err := ctx.Err(); err != nil {
				return err
			}
			if err != nil || found == nil {
				continue
			}
			way := Way{Changes: found.Choices, Forecast: found.Forecast, Note: found.Auto}
			if disk != r.Disk {
				way.Cost = "a disk"
				way.Changes.add("Disk", disk)
			}
			return refusal(cause, []Way{way}, nil)
		}
	}
	return fmt.Errorf("%w; take a smaller model, shorter rows, fewer ranks or a machine with more memory", cause)
}

// InMemory returns the bytes that a rank of a plan needs in some spaces, including those outside
// its arenas.
func InMemory(p *plan.Plan, spaces []graph.Space) (sum int64) {
	for _, sp := range spaces {
		sum += p.Config.Outside[sp] + p.Layout.Spaces[sp].Peak
	}
	return sum
}

// splits returns divisions of a share of the machine's memory into caps on device and host memory,
// in the order tried. Those from index finer on are tried only if lower bounds allow it. If both
// spaces are in main memory, offloading to the host frees nothing. The host therefore first gets
// the least that it needs, and more only for buffers that pass through it to disk.
func (q Request) splits(ctx context.Context, share int64) (list [][graph.NumSpaces]int64, finer int) {
	if len(inMachine(&q.Config)) == 1 {
		return [][graph.NumSpaces]int64{{graph.Device: q.DeviceMemory, graph.Host: atMost(q.HostMemory, share)}}, 1
	}
	host := int64(0) // memory outside the arenas grows with recomputation
	for _, again := range []string{"none", "full"} {
		plain := q
		plain.Offload, plain.Recompute = "", again
		if p, err := plain.Plan(ctx); err == nil {
			host = max(host, InMemory(p, []graph.Space{graph.Host}))
		}
	}
	if 0 < host && host < share {
		list = append(list, q.split(share, host))
	}
	for _, sixteenths := range []int64{2, 4, 8, 1, 3, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15} {
		if sixteenths == 1 {
			finer = len(list)
		}
		if host := share * sixteenths / 16; host > 0 {
			list = append(list, q.split(share, host))
		}
	}
	return list, finer
}

// split gives host bytes of a share to the host and the rest to the device, each at most its cap.
func (q Request) split(share, host int64) [graph.NumSpaces]int64 {
	return [graph.NumSpaces]int64{graph.Device: atMost(q.DeviceMemory, share-host), graph.Host: atMost(q.HostMemory, host)}
}

// atMost returns n, or limit if that is smaller and not 0. The result is at least 1: a cap of 0
// would mean no cap.
func atMost(limit, n int64) int64 {
	if limit > 0 {
		n = min(n, limit)
	}
	return max(n, 1)
}
