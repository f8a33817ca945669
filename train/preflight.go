package train

import (
	"context"
	"fmt"

	"github.com/dustin/go-humanize/english"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
)

// MachineTooSmall is the error for a run whose ranks together plan more memory than the machine
// has, whatever their caps. The system would kill it midway.
type MachineTooSmall struct {
	Ranks   int
	Planned int64  // bytes of device (CPU) and host memory over all ranks
	Total   int64  // bytes of memory and swap available to the ranks
	Host    string // in a job over processes, the host with the least memory; "": this machine
}

func (e *MachineTooSmall) Error() string {
	where := "this machine"
	if e.Host != "" {
		where = "host " + e.Host
	}
	return fmt.Sprintf("does not fit: %s on %s plan %s of memory together and it has %s", english.Plural(e.Ranks, "rank", ""), where, plan.Bytes(e.Planned), plan.Bytes(e.Total))
}

// onThisMachine refuses a plan that this machine's memory can't hold; spaces are those whose
// arenas lie in it. It allows every plan on systems that do not report their memory.
func onThisMachine(cfg *config.Config, p *plan.Plan, spaces []graph.Space) error {
	machine, rank := planner.MachineOf(cfg), planner.InMemory(p, spaces)
	// Divided, not multiplied: a rank's plan may be any int64.
	if machine.Bytes == 0 || rank <= machine.Share() {
		return nil
	}
	return &MachineTooSmall{machine.Ranks, rank * int64(machine.Ranks), machine.Bytes, machine.Host}
}

// openOutputs checks every path that the run will write to, before it starts.
func (t *Trainer) openOutputs(ctx context.Context) error {
	c := t.cfg
	if err := t.openSaver(ctx); err != nil {
		return err
	}
	if c.Trace != "" {
		if err := canWriteAside(c.Trace); err != nil {
			return fmt.Errorf("Config.Trace: %w", err)
		}
	}
	return nil
}
