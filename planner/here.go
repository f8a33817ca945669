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

// FitHere is the package's FitHere of a request.
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

// within is Fit within a rank's share of the machine's memory, divided between device and host
// where both lie in it. Where nothing fits, nearest is what takes the least of the share.
func (q Request) within(ctx context.Context, machine config.HostMemory, fixed Fixed, rows int, hw Hardware) (
	found *Fitted, nearest *NothingFits, err error,
) {
	at, share, both := q, machine.Share(), len(inMachine(&q.Config)) > 1
	list, finer := q.splits(ctx, share)
	least := int64(math.MaxInt64) // what the nearest takes of the share
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
		if takes <= share && i < finer && both { // it fits where the share is divided as it needs
			list = slices.Insert(list, finer, q.split(share, InMemory(none.Smallest.Plan, []graph.Space{graph.Host})))
			finer++
		}
	}
	return nil, nearest, nil
}

// TooSmall adds to the refusal of a plan that the machine's memory can't hold what fits there, if
// a short search finds it: on a disk only where nothing else does.
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

// InMemory is what a rank of a plan takes of some spaces, with what is outside its arenas.
func InMemory(p *plan.Plan, spaces []graph.Space) (sum int64) {
	for _, sp := range spaces {
		sum += p.Config.Outside[sp] + p.Layout.Spaces[sp].Peak
	}
	return sum
}

// splits are the caps by which device and host memory may come out of one share of the
// machine's, tried in order; those from finer on where bounds say that they may do. What
// leaves the device for the host frees nothing where both are the machine's memory, so the
// host first gets as little as it can do with, and more only for what passes through it to
// disk.
func (q Request) splits(ctx context.Context, share int64) (list [][graph.NumSpaces]int64, finer int) {
	if len(inMachine(&q.Config)) == 1 {
		return [][graph.NumSpaces]int64{{graph.Device: q.DeviceMemory, graph.Host: atMost(q.HostMemory, share)}}, 1
	}
	host := int64(0) // what is outside grows with the operations that compute again
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

// split gives the host a part of a share, and the device the rest; each at most its cap.
func (q Request) split(share, host int64) [graph.NumSpaces]int64 {
	return [graph.NumSpaces]int64{graph.Device: atMost(q.DeviceMemory, share-host), graph.Host: atMost(q.HostMemory, host)}
}

// atMost is n bytes, or fewer where a cap is given; a cap of 0 would be none.
func atMost(limit, n int64) int64 {
	if limit > 0 {
		n = min(n, limit)
	}
	return max(n, 1)
}
