package planning

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"text/tabwriter"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/calibration"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/host"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/precision"
)

// gpuSources are who tells of the machine's GPUs.
type gpuSources struct {
	nvml   func() ([]gpus.GPU, error) // all of them
	driver func() (driver.API, error) // those that this process may use
	used   func(uuid [16]byte) (int64, error)
	hidden bool // some may be hidden from this process
}

// detectGPUs asks NVML for the machine's GPUs, and where that can't be, or would tell of
// GPUs that are hidden from this process, the driver, which does not tell without a context
// what is in use.
func detectGPUs(ask gpuSources) ([]gpus.GPU, error) {
	found, err := ask.nvml()
	if err == nil && !ask.hidden {
		return found, nil
	}
	all := found
	api, driverErr := ask.driver()
	if driverErr != nil && err == nil {
		return all, nil
	}
	if driverErr != nil {
		return nil, fmt.Errorf("%w (%w)", err, driverErr)
	}
	list, driverErr := api.Devices()
	if driverErr != nil {
		return nil, driverErr
	}
	found = nil
	for _, d := range list {
		g := gpus.Product(d.Name, d.Memory)
		if used, err := ask.used(d.UUID); err == nil {
			g.Used = used
		}
		found = append(found, g)
	}
	switch {
	case len(found) == 0 && err == nil:
		return nil, errors.New("CUDA_VISIBLE_DEVICES hides this machine's GPUs; name one instead")
	case len(found) == 0:
		return nil, err
	}
	return found, nil
}

func measureCPU(ctx context.Context, c *spillway.Config) (*cost.Calibration, error) {
	cal, err := calibration.Measure(ctx, calibration.Options{Threads: c.ComputeThreads(), Disk: c.Disk, BesideDisk: host.DiskProcs.BesideDisk})
	return cal, cli.Fault(err)
}

// Calibrate measures this machine and keeps the result for later plans and runs.
func Calibrate(ctx context.Context, c *spillway.Config) error {
	cal, err := measureCPU(ctx, c)
	if err != nil {
		return err
	}
	_, err = calibration.Keep(cal)
	return err
}

// cpuRates are the rates of this machine's CPU: what was kept of it or, with --calibrate, what
// is measured now and kept for later plans.
func (f *Flags) cpuRates(ctx context.Context, c *spillway.Config) (cal *cost.Calibration, rates string, err error) {
	if !f.calibrate {
		cal, rates = known(c.ComputeThreads())
		return cal, rates, nil
	}
	f.progress.Says("measuring this machine's CPU …")
	if cal, err = measureCPU(ctx, c); err != nil {
		return nil, "", err
	}
	path, err := calibration.Keep(cal)
	if err != nil {
		return cal, "as calibrated just now; " + err.Error(), nil
	}
	return cal, "as calibrated just now, kept in " + path, nil
}

// onlyCalibrate is --calibrate without a job to plan.
func (f *Flags) onlyCalibrate(ctx context.Context, c *spillway.Config, out io.Writer) error {
	_, rates, err := f.cpuRates(ctx, c)
	if err == nil {
		_, err = fmt.Fprintf(out, "this machine's CPU %s\n", rates)
	}
	return err
}

// detect finds this machine's GPU, the one with the least free memory where there are several,
// and takes what doctor has measured beside it.
func (f *Flags) detect(disk string) error {
	found, err := detectGPUs(gpuSources{gpus.Detect, driver.Open, gpus.Used, os.Getenv("CUDA_VISIBLE_DEVICES") != ""})
	if err != nil {
		return err
	}
	g := found[0]
	for _, other := range found[1:] {
		if other.Memory-other.Used < g.Memory-g.Used { // what fits the smallest fits all
			g = other
		}
	}
	f.machine.GPU = &g
	f.readMeasurements(disk)
	return nil
}

// readMeasurements takes what doctor has measured of this machine, for a plan of
// its own GPUs.
func (f *Flags) readMeasurements(disk string) {
	f.machine.Host = calibration.MemoryBandwidth()
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
func (f *Flags) Hardware(c *spillway.Config) spillway.Hardware {
	if f.gpuFound == nil {
		hw := f.CPU
		hw.Budget = f.plans
		return hw
	}
	g, node := *f.gpuFound, f.nodeSize
	if !f.countInNodes {
		node = gpus.NodeGPUs // more ranks than asked for fill nodes too
	}
	hw := spillway.Hardware{Budget: f.plans, HalfPrecision: g.Rates.BF16 > 0 || g.Rates.FP16 > 0, HostShare: f.hostShare(g)}
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
