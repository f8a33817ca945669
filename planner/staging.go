package planner

import (
	"math"
	"strings"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/hostmem"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/run"
)

// stage decides how checkpoints are saved and adds what that takes to the plan's host
// memory: asynchronously, from a copy of a rank's states, or through a buffer, as large
// as there is room for. Neither keeps a plan from fitting unless it was asked for, nor does
// what saving takes besides: within the caps of a run without checkpoints one with them runs too.
func stage(c *config.Config, p *plan.Plan) error {
	asked, off := strings.EqualFold(c.AsyncSave, config.AsyncOn), strings.EqualFold(c.AsyncSave, config.AsyncOff)
	p.Config.Staging, p.Config.SaveBuffer = 0, 0
	if c.Inference || c.Checkpoint == "" && !asked {
		return nil
	}
	part, _, err := run.PartBytes(p.Program, c.Ranks)
	if err != nil {
		return err
	}
	need, room := checkpoint.StagingBytes(part), hostRoom(c, p)
	ranks := int64(processRanks(c))
	saving := max(0, min((savingOutside+ranks-1)/ranks, room))
	p.Config.Outside[graph.Host] += saving
	room -= saving
	if asked || need <= room && !off {
		p.Config.Staging = need
		p.Config.Outside[graph.Host] += need
		return nil
	}
	p.Config.SaveBuffer = checkpoint.LeastBuffer // in what a rank takes in any case
	if n := min(checkpoint.BufferBytes(part), room) - checkpoint.LeastBuffer; n > 0 {
		p.Config.SaveBuffer += n
		p.Config.Outside[graph.Host] += n
	}
	return nil
}

// hostRoom is what a plan leaves of a rank's host memory: of its cap, and of the
// machine's memory where device memory lies in it.
func hostRoom(c *config.Config, p *plan.Plan) int64 {
	room := int64(math.MaxInt64)
	host := p.Layout.Spaces[graph.Host].Peak + p.Config.Outside[graph.Host]
	if limit := c.HostMemory; limit > 0 {
		room = limit - host
	}
	machine := MachineOf(c)
	if !strings.EqualFold(c.Device, "cuda") {
		host += p.Layout.Spaces[graph.Device].Peak + p.Config.Outside[graph.Device]
	}
	if machine.Bytes > 0 {
		room = min(room, machine.Share()-host)
	}
	return room
}

// MachineOf is the memory that a run's arenas come out of where it is scarcest.
func MachineOf(c *config.Config) config.HostMemory {
	if p := c.Processes(); p != nil {
		return p.Memory(c.LocalRanks)
	}
	return config.HostMemory{Bytes: hostmem.Machine(), Ranks: c.Ranks}
}
