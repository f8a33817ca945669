package planning

import (
	"context"
	"fmt"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
)

// capHost caps a rank's host memory by its share of --node-memory, unless --host-memory is lower.
func (f *Flags) capHost(c *config.Config) {
	if f.nodeMemory == 0 {
		return
	}
	if share := max(1, f.nodeMemory/int64(max(f.nodeSize, 1))); c.HostMemory == 0 || c.HostMemory > share {
		c.HostMemory = share
	}
}

// hostShare returns the host memory that a recommendation may use per rank on a GPU, if no cap is
// given; 0: no limit, because --node-memory is a cap already.
func (f *Flags) hostShare(g gpus.GPU) int64 {
	if f.server == nil {
		return 0
	}
	return gpus.ForRanks(g.Server().Memory)
}

// ranksAServer returns the number of ranks that share a server's memory.
func (f *Flags) ranksAServer(c *config.Config) int64 {
	return int64(max(1, min(f.nodeSize, c.Ranks)))
}

// servers returns the number of servers.
func (f *Flags) servers(c *config.Config) int {
	n := max(1, f.nodeSize)
	return (c.Ranks + n - 1) / n
}

// onServer returns the memory that all ranks of a server use of a space, including outside the
// arenas.
func (f *Flags) onServer(p *planner.Forecast, s graph.Space) int64 {
	return f.ranksAServer(&p.Config) * (p.Plan.Layout.Spaces[s].Peak + p.Plan.Config.Outside[s])
}

// process returns the memory that all ranks of a process use of the machine's memory.
func (f *Flags) process(p *planner.Forecast) int64 {
	ranks, spaces := p.Config.Ranks, []graph.Space{graph.Device, graph.Host}
	if n := p.Config.LocalRanks; n > 0 {
		ranks = min(n, ranks)
	}
	if f.gpuFound != nil {
		spaces = spaces[1:]
	}
	return int64(ranks) * planner.InMemory(p.Plan, spaces)
}

// asCommanded replans the ways with more ranks as their commands run them, with full servers. It
// drops ways that then do not fit.
func (f *Flags) asCommanded(ctx context.Context, ways []planner.Way, hw planner.Hardware) (
	list []planner.Way, no *planner.NoWay, err error,
) {
	for _, way := range ways {
		if way.Cost == "more ranks" && !f.countInNodes {
			c, own := way.Forecast.Config, *f
			own.fillServers(&c)
			if way.Forecast, err = f.request(c).Predict(ctx, hw.Machine(c.Ranks)); err != nil {
				return nil, nil, err
			}
			if !way.Forecast.Fits {
				no = &planner.NoWay{Nearest: way.Forecast, Choices: way.Changes, Tried: len(ways)}
				continue
			}
		}
		list = append(list, way)
	}
	if len(list) > 0 {
		no = nil
	}
	return list, no, nil
}

// fillServers divides the ranks over servers as if only their number were given.
func (f *Flags) fillServers(c *config.Config) {
	f.nodeSize = c.Ranks // the CPU's ranks are on one machine
	if f.gpuFound != nil {
		f.nodeSize = min(c.Ranks, gpus.NodeGPUs)
		c.LocalRanks = f.nodeSize
	}
	c.HostMemory = f.hostMemory
	f.capHost(c)
}

// refusedHere returns a text if train rejects the answer, or the request, on this machine, whose
// memory must hold all ranks' arenas. It returns "" if not, or if the plan is for another machine.
func (r *planReport) refusedHere(a *answer) string {
	f := r.flags
	if f.here == nil || f.read || f.gpuFound != nil || f.countInNodes {
		return ""
	}
	refused := func(p *planner.Forecast) string {
		m, rank := planner.MachineOf(&p.Config), planner.InMemory(p.Plan, []graph.Space{graph.Device, graph.Host})
		if m.Holds(rank) {
			return ""
		}
		return fmt.Sprintf("train refuses it here: it takes %s of memory and this machine has %s",
			plan.Bytes(rank*int64(m.Ranks)), plan.Bytes(m.Bytes))
	}
	text := refused(r.asked)
	if a == nil || a.plan == r.asked {
		return text
	}
	if own := refused(a.plan); own != "" || text == "" {
		return own
	}
	return "as requested, " + text
}

// serverNote describes the memory of the servers and its source; "": nothing is known.
func (f *Flags) serverNote(asked *planner.Forecast) string {
	n := f.ranksAServer(&asked.Config)
	switch {
	case f.nodeMemory > 0:
		return fmt.Sprintf("a server's memory of %s (--node-memory) is shared by its %d ranks",
			plan.Bytes(f.nodeMemory), n)
	case f.server == nil:
		return ""
	}
	total := n * f.server.Memory
	text := fmt.Sprintf("a server of %d is taken to have %s (%s); --node-memory says what yours has", n,
		plan.Bytes(total), f.server.Source)
	if asked.Config.HostMemory == 0 && f.onServer(asked, graph.Host) > gpus.ForRanks(total) {
		text += ". What was asked for needs more than that"
	}
	return text
}
