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

// capHost makes a rank's cap on host memory of --node-memory, unless
// --host-memory is less.
func (f *Flags) capHost(c *config.Config) {
	if f.nodeMemory == 0 {
		return
	}
	if share := max(1, f.nodeMemory/int64(max(f.nodeSize, 1))); c.HostMemory == 0 || c.HostMemory > share {
		c.HostMemory = share
	}
}

// hostShare is what a recommendation may take of host memory a rank on a GPU
// where nothing caps it; 0: anything, for --node-memory is a cap already.
func (f *Flags) hostShare(g gpus.GPU) int64 {
	if f.server == nil {
		return 0
	}
	return gpus.ForRanks(g.Server().Memory)
}

// ranksAServer is how many ranks share a server's memory.
func (f *Flags) ranksAServer(c *config.Config) int64 {
	return int64(max(1, min(f.nodeSize, c.Ranks)))
}

// servers is how many servers the ranks are on.
func (f *Flags) servers(c *config.Config) int {
	n := max(1, f.nodeSize)
	return (c.Ranks + n - 1) / n
}

// onServer is what the ranks of a server take of a space together.
func (f *Flags) onServer(p *planner.Forecast, s graph.Space) int64 {
	return f.ranksAServer(&p.Config) * (p.Plan.Layout.Spaces[s].Peak + p.Plan.Config.Outside[s])
}

// process is what the ranks of a process take of the machine's own memory together.
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

// asCommanded gives ways with more ranks the plans of their own commands, in which the ranks
// fill their servers. A way that does not fit so is none.
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

// fillServers divides the ranks over servers as where their number alone is given.
func (f *Flags) fillServers(c *config.Config) {
	f.nodeSize = c.Ranks // the CPU's ranks are on one machine
	if f.gpuFound != nil {
		f.nodeSize = min(c.Ranks, gpus.NodeGPUs)
		c.LocalRanks = f.nodeSize
	}
	c.HostMemory = f.hostMemory
	f.capHost(c)
}

// refusedHere says that train refuses the answer, or the request, on the machine that plans: all
// ranks' arenas are in its memory. "": it does not, or the plan is for another machine.
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

// serverNote says what the servers have, and how that is known; "" where nothing
// is.
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
