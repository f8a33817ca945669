package planning

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/precision"
)

// onlyCalibrate is --calibrate without a job to plan.
func (f *Flags) onlyCalibrate(ctx context.Context, c *config.Config, out io.Writer) error {
	_, rates, err := f.cpuRates(ctx, c)
	if err == nil {
		_, err = fmt.Fprintf(out, "this machine's CPU %s\n", rates)
	}
	return err
}

// readMeasurements takes what doctor has measured of this machine, for a plan of
// its own GPUs.
func (f *Flags) readMeasurements(disk string) {
	f.machine.Host = f.here.MemoryBandwidth()
	if disk == "" {
		return
	}
	if t, err := store.LoadTuning(disk); err == nil {
		f.machine.Disk = &DiskSpeed{Read: t.ReadBytesPerSec, Write: t.WriteBytesPerSec}
	}
}

// measured replaces a preset's rates of the host by measured ones, of which each
// of a node's ranks has its share.
func (f *Flags) measured(m *cost.Machine, ranks int) {
	n := float64(max(ranks, 1))
	if f.machine.Host > 0 {
		m.HostMemory = f.machine.Host / n
	}
	if d := f.machine.Disk; d != nil && d.Read > 0 && d.Write > 0 {
		m.DiskRead, m.DiskWrite = d.Read/n, d.Write/n
	}
}

// Hardware is what the time is predicted on.
func (f *Flags) Hardware(c *config.Config) planner.Hardware {
	if f.gpuFound == nil {
		hw := f.CPU
		hw.Budget = f.plans
		return hw
	}
	g, node := *f.gpuFound, f.nodeSize
	if !f.countInNodes {
		node = gpus.NodeGPUs // more ranks than asked for fill nodes too
	}
	hw := planner.Hardware{Budget: f.plans, HalfPrecision: g.Rates.BF16 > 0 || g.Rates.FP16 > 0, HostShare: f.hostShare(g)}
	hw.Machine = func(ranks int) *cost.Machine {
		m := g.Machine(min(node, ranks))
		f.measured(m, min(node, ranks))
		return m
	}
	if c.DeviceMemory == g.Memory-g.Used { // a cap of one's own stays
		for _, o := range gpus.List() {
			if amd := o.Arch == gpus.CDNA3; o.Memory > g.Memory && amd == (g.Arch == gpus.CDNA3) {
				hw.Larger = append(hw.Larger, planner.LargerDevice{Name: o.Name, Memory: o.Memory, Outside: o.OutsideBytes(), HostShare: f.hostShare(o),
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

func listModels(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "model\tlayers\twidth\theads\tvocabulary\tpositions\tsource")
	for _, p := range model.Presets() {
		c := p.Config
		fmt.Fprintf(tw, "%s\t%d\t%d\t%d\t%d\t%d\t%s\n", p.Name, c.Layers, c.Width, c.Heads, c.Vocab, c.Positions, p.Source)
	}
	return tw.Flush()
}

func listGPUs(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	rate := func(v float64) string {
		if v == 0 {
			return "–"
		}
		return fmt.Sprintf("%g", v/1e12)
	}
	fmt.Fprintln(tw, "GPU\tmemory\toutside*\tfp32\ttf32\tfp16\tbf16\tint8\tfp8\tmemory GB/s\tNVLink\tPCIe\tnetwork\tsource")
	for _, g := range gpus.List() {
		r := g.Rates
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%g\t%g\t%g\t%g\t%s\n", g.Name, plan.Bytes(g.Memory), plan.Bytes(g.OutsideBytes()),
			rate(r.FP32), rate(r.TF32), rate(r.FP16), rate(r.BF16), rate(r.INT8), rate(r.FP8),
			g.MemoryBandwidth/1e9, g.NVLink/1e9, g.PCIe/1e9, g.Network/1e9, g.Source)
	}
	fmt.Fprintln(tw, "\nRates: dense matrix products, TFLOP/s. Links: GB/s of one GPU in one direction.")
	fmt.Fprintln(tw, "* context and libraries of a process: an estimate by generation until it is measured.")
	return tw.Flush()
}
