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

// stage decides how checkpoints are saved, and adds the memory for it to the plan's host memory.
// Saves are asynchronous, from a copy of a rank's states, or synchronous, through a buffer that is
// as large as there is room for. They use only memory that is left, except for a copy that was
// asked for: a run that fits without checkpoints also fits with them.
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
	p.Config.SaveBuffer = checkpoint.LeastBuffer // included in what every rank needs
	if n := min(checkpoint.BufferBytes(part), room) - checkpoint.LeastBuffer; n > 0 {
		p.Config.SaveBuffer += n
		p.Config.Outside[graph.Host] += n
	}
	return nil
}

// hostRoom returns the bytes that a plan leaves free of a rank's host memory: of its cap, and of
// its share of the machine's memory, which also holds device memory on the CPU.
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

// MachineOf returns the main memory that holds a run's arenas; in a job, that of the host with the
// least.
func MachineOf(c *config.Config) config.HostMemory {
	if p := c.Processes(); p != nil {
		return p.Memory(c.LocalRanks)
	}
	return config.HostMemory{Bytes: hostmem.Machine(), Ranks: c.Ranks}
}
