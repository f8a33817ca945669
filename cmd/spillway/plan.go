package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/internal/presets"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/zero"
)

// planFlags are the flags of `spillway plan` beside train's.
type planFlags struct {
	gpu                  string
	nodes, gpusPerNode   int
	jsonPath, htmlPath   string
	listModels, listGPUs bool
	gpuFound             *gpus.GPU // what --gpu names
	nodeSize             int       // GPUs of a server
	countInNodes         bool      // ranks were given as nodes
	reference            string
	calibrate            bool
	cpu                  spillway.Hardware // without --gpu
	rates                string            // where its rates are from
	memory               float64           // bytes/s of this machine's memory, with --gpu detect; 0: not measured
	diskRead, diskWrite  float64           // bytes/s of --disk, likewise
	chosen               bool              // --fit has chosen the configuration
}

func planCommand() *cobra.Command {
	var c spillway.Config
	var l later
	var f planFlags
	cmd := &cobra.Command{
		Use:   "plan",
		Short: "What a run needs of each memory and how long a step takes, exactly and before it starts",
		Long: `Plan a run without running it: for each ZeRO stage what a rank needs of device
memory, host memory and disk, what it sends, how long a step should take, and
whether it fits; then what lies in memory at the peak; and where it does not
fit, what would make it fit. It takes train's flags, and needs no weights, no
data and no GPU.`,
		Args: noArguments,
	}
	fs := cmd.Flags()
	trainFlags(fs, &c, &l)
	f.bind(fs, &c)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		out := cmd.OutOrStdout()
		switch {
		case f.listModels:
			return listModels(out)
		case f.listGPUs:
			return listGPUs(out)
		}
		if path := fs.Lookup("config").Value.String(); path != "" {
			if err := applyConfigFile(fs, path); err != nil {
				return err
			}
		}
		if err := l.refuse(); err != nil {
			return err
		}
		if err := f.validateReference(); err != nil {
			return err
		}
		if err := f.settle(fs, &c); err != nil {
			return err
		}
		if err := c.Validate(); err != nil {
			return err
		}
		if f.calibrate {
			if f.gpuFound != nil {
				return errors.New("--calibrate measures this machine's CPU, and --gpu plans for a GPU; leave one of them out")
			}
			if err := f.calibrateCPU(cmd.Context(), &c); err != nil {
				return err
			}
		} else if f.gpuFound == nil {
			f.cpu, f.rates = spillway.KnownHardware(c.ComputeThreads())
		}
		var best *spillway.Fitted
		if l.fit {
			var err error
			if best, err = spillway.Fit(c, fs.Changed, l.globalBatch, f.hardware(&c)); err != nil {
				return err
			}
			takeFitted(&c, best)
		}
		f.chosen = l.fit
		return runPlan(c, &f, best, out)
	}
	return cmd
}

// bind makes the flags that train does not have.
func (f *planFlags) bind(fs *pflag.FlagSet, c *spillway.Config) {
	fs.StringVar(&f.gpu, "gpu", "", "plan for GPU `NAME` (--list-gpus), or detect for this machine's own")
	fs.IntVar(&f.nodes, "nodes", 1, "servers; ranks are --nodes times --gpus-per-node")
	fs.IntVar(&f.gpusPerNode, "gpus-per-node", 1, "GPUs of a server")
	fs.IntVar(&c.ShardSize, "shard-size", 0, "shard over groups of `N` ranks and replicate over the groups (HSDP; default: shard over all)")
	fs.StringVar(&f.jsonPath, "json", "", "write the plan as JSON to `FILE`, - for stdout")
	fs.StringVar(&f.htmlPath, "html", "", "write the plan as a page with memory timelines to `FILE`")
	fs.BoolVar(&f.calibrate, "calibrate", false, "measure this machine's CPU for a few seconds first, for the predicted time, and keep the result for later plans (without --gpu)")
	fs.StringVar(&f.reference, "reference", "none", "set a formula of the literature beside the plan's activations: none or megatron")
	fs.BoolVar(&f.listModels, "list-models", false, "list the models that --model names")
	fs.BoolVar(&f.listGPUs, "list-gpus", false, "list the GPUs that --gpu names")
}

// settle turns the flags of the hardware into ranks, caps and what is outside
// the arena.
func (f *planFlags) settle(fs *pflag.FlagSet, c *spillway.Config) error {
	for _, n := range []struct {
		flag string
		v    int
	}{{"nodes", f.nodes}, {"gpus-per-node", f.gpusPerNode}} {
		if n.v < 1 {
			return fmt.Errorf("--%s %d: at least 1 is needed", n.flag, n.v)
		}
	}
	f.countInNodes = fs.Changed("nodes") || fs.Changed("gpus-per-node")
	if f.countInNodes {
		if f.nodes > 1<<20/f.gpusPerNode {
			return fmt.Errorf("--nodes %d --gpus-per-node %d: more than %d ranks are not planned", f.nodes, f.gpusPerNode, 1<<20)
		}
		ranks := f.nodes * f.gpusPerNode
		if fs.Changed("ranks") && c.Ranks != ranks {
			return fmt.Errorf("--ranks %d contradicts --nodes %d times --gpus-per-node %d, which is %d; leave --ranks out", c.Ranks, f.nodes, f.gpusPerNode, ranks)
		}
		c.Ranks = ranks
	}
	f.nodeSize = min(c.Ranks, gpus.NodeGPUs)
	if f.countInNodes {
		f.nodeSize = f.gpusPerNode
	}
	if fs.Changed("shard-size") && c.ShardSize < 1 {
		return fmt.Errorf("--shard-size %d: at least 1 rank is needed; leave it out to shard over all", c.ShardSize)
	}
	if f.gpu == "" {
		return nil
	}
	var g gpus.GPU
	if strings.EqualFold(f.gpu, "detect") {
		found, err := detectGPUs(gpus.Detect, driver.Open)
		if err != nil {
			return fmt.Errorf("--gpu detect: %w", err)
		}
		g = found[0]
		for _, other := range found[1:] {
			if other.Memory-other.Used < g.Memory-g.Used { // what fits the smallest fits all
				g = other
			}
		}
		f.readMeasurements(c.Disk)
	} else {
		var err error
		if g, err = gpus.Lookup(f.gpu); err != nil {
			return fmt.Errorf("--gpu: %w", err)
		}
	}
	f.gpuFound = &g
	if free := g.Memory - g.Used; c.DeviceMemory == 0 || c.DeviceMemory > free {
		c.DeviceMemory = free
	}
	c.Outside[graph.Device], c.Outside[graph.Host] = g.OutsideBytes(), gpus.HostOutsideBytes
	c.LocalRanks = f.nodeSize
	c.Target = graph.CUDATarget()
	return nil
}

// detectGPUs asks NVML for the machine's GPUs, and where that can't be, the
// driver, which does not tell without a context what is in use.
func detectGPUs(nvml func() ([]gpus.GPU, error), open func() (driver.API, error)) ([]gpus.GPU, error) {
	found, err := nvml()
	if err == nil {
		return found, nil
	}
	api, driverErr := open()
	if driverErr != nil {
		return nil, fmt.Errorf("%w (%w)", err, driverErr)
	}
	list, driverErr := api.Devices()
	if driverErr != nil {
		return nil, driverErr
	}
	for _, d := range list {
		found = append(found, gpus.Product(d.Name, d.Memory))
	}
	if len(found) == 0 {
		return nil, err
	}
	return found, nil
}

// calibrateCPU measures this machine and keeps the result for later plans.
func (f *planFlags) calibrateCPU(ctx context.Context, c *spillway.Config) error {
	cal, err := spillway.Calibrate(ctx, c.Threads, c.Disk)
	if err != nil {
		return fault(err)
	}
	f.cpu, f.rates = spillway.Hardware{Machine: cal.Machine}, "as calibrated just now"
	if path, err := spillway.KeepCalibration(cal); err == nil {
		f.rates += ", kept in " + path
	} else {
		f.rates += "; " + err.Error()
	}
	return nil
}

// readMeasurements takes what doctor has measured of this machine, for a plan of
// its own GPUs.
func (f *planFlags) readMeasurements(disk string) {
	f.memory = spillway.KeptMemoryBandwidth()
	if disk == "" {
		return
	}
	if t, err := store.LoadTuning(disk); err == nil {
		f.diskRead, f.diskWrite = t.ReadBytesPerSec, t.WriteBytesPerSec
	}
}

// measured replaces a preset's rates of the host by measured ones, of which each
// of a node's ranks has its share.
func (f *planFlags) measured(m *cost.Machine, ranks int) {
	n := float64(max(ranks, 1))
	if f.memory > 0 {
		m.HostMemory = f.memory / n
	}
	if f.diskRead > 0 && f.diskWrite > 0 {
		m.DiskRead, m.DiskWrite = f.diskRead/n, f.diskWrite/n
	}
}

// hardware is what the time is predicted on.
func (f *planFlags) hardware(c *spillway.Config) spillway.Hardware {
	if f.gpuFound == nil {
		return f.cpu
	}
	g, node := *f.gpuFound, f.nodeSize
	hw := spillway.Hardware{HalfPrecision: true, Machine: func(ranks int) *cost.Machine {
		m := g.Machine(min(node, ranks))
		f.measured(m, min(node, ranks))
		return m
	}}
	if c.DeviceMemory == g.Memory-g.Used { // a cap of one's own stays
		for _, o := range gpus.List() {
			if o.Memory > g.Memory {
				hw.Larger = append(hw.Larger, spillway.LargerDevice{Name: o.Name, Memory: o.Memory, Outside: o.OutsideBytes(),
					Machine: func(ranks int) *cost.Machine { return o.Machine(min(node, ranks)) }})
			}
		}
		slices.SortStableFunc(hw.Larger, func(a, b spillway.LargerDevice) int { return cmp.Compare(a.Memory, b.Memory) })
	}
	if f.countInNodes {
		hw.NodeSize = f.gpusPerNode
	}
	return hw
}

// runPlan plans all four stages, tells about them, and refuses what does not fit.
func runPlan(c spillway.Config, f *planFlags, best *spillway.Fitted, stdout io.Writer) error {
	hw := f.hardware(&c)
	stages, err := forecastStages(c, hw)
	if err != nil {
		return err
	}
	asked := stages[c.Zero]
	text := stdout
	if f.jsonPath == "-" {
		text = io.Discard
	}
	r := planReport{flags: f, stages: stages, asked: asked, best: best}
	if !asked.Fits {
		r.ways, r.noWay = spillway.WaysOut(asked, hw)
	}
	if best == nil {
		r.recommend(c, hw)
	}
	if err := r.print(text); err != nil {
		return err
	}
	if f.jsonPath != "" {
		doc, err := planJSON(asked, stages, r.best)
		if err != nil {
			return err
		}
		if f.jsonPath == "-" {
			if _, err := stdout.Write(doc); err != nil {
				return err
			}
		} else if err := writeNew(f.jsonPath, doc); err != nil {
			return fmt.Errorf("--json: %w", err)
		}
	}
	if f.htmlPath != "" {
		page, err := r.html()
		if err == nil {
			err = writeNew(f.htmlPath, page)
		}
		if err != nil {
			return fmt.Errorf("--html: %w", err)
		}
	}
	return asked.Plan.Fit()
}

// takeFitted sets what the search chose.
func takeFitted(c *spillway.Config, best *spillway.Fitted) {
	b := best.Forecast.Config
	c.Zero, c.Batch, c.Accum, c.Prefetch, c.Recompute, c.Offload, c.Precision = b.Zero, b.Batch, b.Accum, b.Prefetch, b.Recompute, b.Offload, b.Precision
}

// printFitted says what the search chose, and why.
func printFitted(w io.Writer, best *spillway.Fitted) {
	fmt.Fprintf(w, "recommended: %s: the fastest by prediction of %d configurations planned, %s a step and %.0f tokens/s\n", best.Flags, best.Tried, seconds(best.Step.Seconds), best.TokensPerSecond())
	for _, why := range best.Reasons {
		fmt.Fprintf(w, "  %s\n", why)
	}
}

// recommend looks for the fastest configuration of the same micro-batch, ranks
// and layout. Where what was asked for does not fit, the ways out have searched
// that already.
func (r *planReport) recommend(c spillway.Config, hw spillway.Hardware) {
	if !r.asked.Fits {
		for _, way := range r.ways {
			if way.Cost == "" && (r.best == nil || way.Forecast.TokensPerSecond() > r.best.TokensPerSecond()) {
				r.best = &spillway.Fitted{Forecast: way.Forecast, Flags: way.Text, Reasons: spillway.Reasons(way.Forecast)}
			}
		}
		return
	}
	c.Recompute, c.Offload = "none", ""
	if best, err := spillway.Fit(c, func(string) bool { return false }, 0, hw); err == nil {
		r.best = best
	}
}

// printRecommended sets the recommended configuration beside the requested one.
func (r *planReport) printRecommended(w io.Writer) {
	asked, best := r.asked, r.best
	if best == nil {
		return
	}
	ratio := best.TokensPerSecond() / asked.TokensPerSecond()
	switch {
	case asked.Fits && ratio < 1.005:
		fmt.Fprintf(w, "recommended: as requested; nothing found is faster (%s a step, %.0f tokens/s predicted)\n", seconds(asked.Step.Seconds), asked.TokensPerSecond())
		fmt.Fprintf(w, "  %s\n\n", spillway.Reasons(asked)[0])
		return
	case asked.Fits:
		fmt.Fprintf(w, "recommended: %s: %s a step and %.0f tokens/s predicted, against %s and %.0f as requested (%.2f × as fast)\n",
			best.Flags, seconds(best.Step.Seconds), best.TokensPerSecond(), seconds(asked.Step.Seconds), asked.TokensPerSecond(), ratio)
	default:
		fmt.Fprintf(w, "recommended: %s: %s a step and %.0f tokens/s predicted; as requested it does not fit, and would take %s\n",
			best.Flags, seconds(best.Step.Seconds), best.TokensPerSecond(), seconds(asked.Step.Seconds))
	}
	for _, why := range best.Reasons {
		fmt.Fprintf(w, "  %s\n", why)
	}
	fmt.Fprintln(w)
}

// forecastStages plans a configuration at stages 0 to 3, two at a time: a plan
// of thousands of layers takes memory of its own.
func forecastStages(c spillway.Config, hw spillway.Hardware) ([]*spillway.Forecast, error) {
	stages := make([]*spillway.Forecast, 4)
	errs := make([]error, 4)
	var wg sync.WaitGroup
	slots := make(chan struct{}, 2)
	for z := range stages {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			one := c
			one.Zero = z
			stages[z], errs[z] = spillway.Predict(one, hw.Machine(one.Ranks))
		})
	}
	wg.Wait()
	if errs[c.Zero] != nil {
		return nil, errs[c.Zero]
	}
	return stages, errors.Join(errs...)
}

func writeNew(path string, data []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, data, 0o644)
}

func listModels(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "model\tlayers\twidth\theads\tvocabulary\tpositions\tsource")
	for _, p := range presets.List() {
		c := p.Config
		fmt.Fprintf(tw, "%s\t%d\t%d\t%d\t%d\t%d\t%s\n", p.Name, c.Layers, c.Hidden, c.Heads, c.Vocab, c.Positions, p.Source)
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

// textbookStates is the paper's model states of the requested plan, for
// comparison: 2 + 2 + 12 bytes a parameter in mixed precision, 4 + 4 + 8 in fp32.
func textbookStates(f *spillway.Forecast) float64 {
	n := float64(f.Parameters())
	ranks := f.Config.Ranks
	if f.Config.ShardSize > 0 {
		ranks = f.Config.ShardSize
	}
	w, g, k := 4.0, 4.0, 8.0
	if p := strings.ToLower(f.Config.Precision); p == "bf16" || p == "fp16" {
		w, g, k = 2, 2, 12
	}
	return zero.Stage(f.Config.Zero).ModelStateBytes(n, float64(ranks), w, g, k)
}
