package planning

import (
	"cmp"
	"slices"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/precision"
)

// measured replaces a preset's rates of host memory and disk by measured ones, divided by the ranks
// of a node.
func (f *Flags) measured(m *cost.Machine, ranks int) {
	n := float64(max(ranks, 1))
	if f.machine.Host > 0 {
		m.HostMemory = f.machine.Host / n
	}
	if d := f.machine.Disk; d != nil && d.Read > 0 && d.Write > 0 {
		m.DiskRead, m.DiskWrite = d.Read/n, d.Write/n
	}
}

// Hardware returns the hardware that the time is predicted for.
func (f *Flags) Hardware(c *config.Config) planner.Hardware {
	if f.gpuFound == nil {
		hw := f.CPU
		hw.Budget = f.plans
		return hw
	}
	g, node := *f.gpuFound, f.nodeSize
	if !f.countInNodes {
		node = gpus.NodeGPUs // more ranks than requested fill nodes too
	}
	hw := planner.Hardware{Budget: f.plans, HalfPrecision: g.Rates.BF16 > 0 || g.Rates.FP16 > 0,
		HostShare: f.hostShare(g)}
	hw.Machine = func(ranks int) *cost.Machine {
		m := g.Machine(min(node, ranks))
		f.measured(m, min(node, ranks))
		return m
	}
	if c.DeviceMemory == g.Memory-g.Used { // a given cap stays
		for _, o := range gpus.List() {
			if amd := o.Arch == gpus.CDNA3; o.Memory > g.Memory && amd == (g.Arch == gpus.CDNA3) {
				hw.Larger = append(hw.Larger, planner.LargerDevice{Name: o.Name, Memory: o.Memory,
					Outside: o.OutsideBytes(), HostShare: f.hostShare(o),
					Machine: func(ranks int) *cost.Machine { return o.Machine(min(node, ranks)) }})
			}
		}
		slices.SortStableFunc(hw.Larger, func(a, b planner.LargerDevice) int { return cmp.Compare(a.Memory, b.Memory) })
	}
	if f.countInNodes {
		hw.NodeSize = f.gpusPerNode
	}
	if g.Rates.BF16 > 0 && !f.precisionGiven {
		hw.Prefer = precision.BF16
	}
	return hw
}
