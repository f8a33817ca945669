// Package planning is the command plan.
package planning

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
	"github.com/spillway-ml/spillway/calibration"
	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/host"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/zero"
)

// Flags are the flags of `spillway plan` beside train's.
type Flags struct {
	gpu                  string
	nodes, gpusPerNode   int
	jsonPath, htmlPath   string
	dump                 string
	listModels, listGPUs bool
	gpuFound             *gpus.GPU // what --gpu names
	nodeSize             int       // GPUs of a server
	countInNodes         bool      // ranks were given as nodes
	reference            string
	calibrate            bool
	CPU                  spillway.Hardware // without --gpu
	Rates                string            // where its rates are from
	transport            string            // how its ranks meet
	memory               float64           // bytes/s of this machine's memory, with --gpu detect; 0: not measured
	diskRead, diskWrite  float64           // bytes/s of --disk, likewise
	chosen               bool              // --fit has chosen the configuration
	hopeless             bool              // --fit has found nothing that fits
	nodeMemory           int64             // bytes of a server's memory, as given; 0: not
	server               *gpus.Server      // what stands in for it, with --gpu
	given                []string          // the command's flags, each "--name=value"
	precisionGiven       bool
	seqGiven             bool
	openRows             int // rows of a step where --batch was left open; 0: it was not
	accumGiven           bool
	live                 *cli.LiveLine // tells what a search is for, which takes seconds; nil: not a terminal
}

// searching says on a terminal what is searched for, until the function that it returns
// is called.
func (f *Flags) searching(what string) (found func()) {
	return f.live.Telling(what)
}

func Command() *cobra.Command {
	var c spillway.Config
	var l options.Later
	var f Flags
	cmd := &cobra.Command{
		Use:   "plan",
		Short: "What a run needs of each memory and how long a step takes, exactly and before it starts",
		Long: `Plan a run without running it: for each ZeRO stage what a rank needs of device
memory, host memory and disk, what it sends, how long a step should take, and
whether it fits; then what lies in memory at the peak; and where it does not
fit, what would make it fit. It takes train's flags, and needs no weights, no
data and no GPU.`,
		Args: cli.NoArguments,
	}
	fs := cmd.Flags()
	options.Train(fs, &c, &l)
	f.Bind(fs, &c)
	cli.Hide(fs, "checkpoint", "collectives", "cuda-graphs", "data", "data-glob", "eval-every", "eval-steps", "export", "init", "keep", "metrics", "metrics-addr", "order", "require-pinned", "resume", "save-every", "seed", "tensorboard", "text-field", "timeout", "tokenizer", "trace")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		defer host.PlanHeap.Acquire()()
		out := cmd.OutOrStdout()
		f.live = cli.NewLiveLine(cmd.ErrOrStderr())
		switch {
		case f.listModels:
			return listModels(out)
		case f.listGPUs:
			return listGPUs(out)
		}
		if path := fs.Lookup("config").Value.String(); path != "" {
			if err := cli.ApplyConfigFile(fs, path); err != nil {
				return err
			}
		}
		if err := cmp.Or(options.RefuseUnderOne(fs), l.Refuse(), cli.RefuseOverwriting(fs)); err != nil {
			return err
		}
		f.keep(fs)
		if err := cmp.Or(f.validateReference(), f.Settle(fs, &c)); err != nil {
			return err
		}
		if err := c.Validate(); err != nil {
			return err
		}
		if err := l.Follow(fs, &c, io.Discard); err != nil {
			return err
		}
		f.openRows = l.OpenRows(fs)
		options.TuneDisk(&c, cmd.ErrOrStderr())
		if err := f.outputs(); err != nil {
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
			f.CPU, f.Rates = KnownHardware(c.ComputeThreads())
		}
		if f.gpuFound == nil {
			if err := f.overTransport(c.Ranks); err != nil {
				return err
			}
		} else if fs.Changed("transport") {
			return errors.New("--transport is how CPU ranks meet; leave it out with --gpu")
		}
		c = c.Sharing()
		var best *spillway.Fitted
		if l.Fit {
			var err error
			found := f.searching("searching for the fastest configuration that fits …")
			best, err = spillway.Fit(cmd.Context(), c, options.FixedBy(fs), l.GlobalBatch, f.Hardware(&c))
			found()
			var none *spillway.NothingFits
			switch {
			case errors.As(err, &none):
				return f.nothingFits(cmd.Context(), c, none, l.GlobalBatch, out)
			case err != nil:
				return err
			}
			takeFitted(&c, best)
		}
		f.chosen = l.Fit
		return runPlan(cmd.Context(), c, &f, best, out)
	}
	return cmd
}

// keep notes which flags were given, on the command line or in its file.
func (f *Flags) keep(fs *pflag.FlagSet) {
	fs.Visit(func(given *pflag.Flag) {
		if given.Name != "config" { // its flags stand here by themselves
			f.given = append(f.given, "--"+given.Name+"="+given.Value.String())
		}
	})
}

// Bind makes the flags that train does not have.
func (f *Flags) Bind(fs *pflag.FlagSet, c *spillway.Config) {
	fs.StringVar(&f.gpu, "gpu", "", "plan for GPU `NAME` (--list-gpus), or detect for this machine's own")
	fs.IntVar(&f.nodes, "nodes", 1, "servers; ranks are --nodes times --gpus-per-node")
	fs.IntVar(&f.gpusPerNode, "gpus-per-node", 1, "GPUs of a server")
	fs.IntVar(&c.ShardSize, "shard-size", 0, "shard over groups of `N` ranks and replicate over the groups (HSDP; in bf16 and fp16 with last bits of its own; default: shard over all)")
	fs.Var(cli.Size(&f.nodeMemory), "node-memory", "memory of a server, which its ranks share (default with --gpu: that of a usual one, within which recommendations stay)")
	fs.StringVar(&f.jsonPath, "json", "", "write the plan as JSON to `FILE`, - for stdout")
	fs.StringVar(&f.htmlPath, "html", "", "write the plan as a page with memory timelines to `FILE`")
	fs.StringVar(&f.dump, "dump", "", "write the program after each pass, and what the pass changed, into the new folder `DIR`")
	fs.BoolVar(&f.calibrate, "calibrate", false, "measure this machine's CPU for a few seconds first, for the predicted time, and keep the result for later plans (without --gpu)")
	fs.StringVar(&f.transport, "transport", cluster.InProc, "how CPU ranks meet, for the predicted time: inproc, shm or mpi, as bench comm has measured it")
	fs.StringVar(&f.reference, "reference", "none", "set a formula of the literature beside the plan's activations: none or megatron")
	fs.BoolVar(&f.listModels, "list-models", false, "list the models that --model names")
	fs.BoolVar(&f.listGPUs, "list-gpus", false, "list the GPUs that --gpu names")
}

// Settle turns the flags of the hardware into ranks, caps and what is outside
// the arena.
func (f *Flags) Settle(fs *pflag.FlagSet, c *spillway.Config) error {
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
	f.precisionGiven, f.seqGiven, f.accumGiven = fs.Changed("precision"), fs.Changed("seq"), fs.Changed("accum")
	if f.gpu == "" && !f.countInNodes {
		f.nodeSize = c.Ranks // the CPU's ranks are on one machine
	}
	f.capHost(c)
	if f.gpu == "" {
		switch {
		case fs.Changed("gpu"):
			return errors.New(`--gpu "": the name of a GPU is missing; --list-gpus lists them, and detect is this machine's own`)
		case strings.EqualFold(c.Device, "cuda"):
			return errors.New("--device cuda: say which GPU to plan for: --gpu NAME (--list-gpus lists them) or --gpu detect")
		}
		return nil
	}
	var g gpus.GPU
	if strings.EqualFold(f.gpu, "detect") {
		found, err := detectGPUs(gpuSources{gpus.Detect, driver.Open, gpus.Used, os.Getenv("CUDA_VISIBLE_DEVICES") != ""})
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
			return fmt.Errorf("--gpu: %w (all: spillway plan --list-gpus)", err)
		}
	}
	f.gpuFound = &g
	if server := g.Server(); f.nodeMemory == 0 {
		f.server = &server
	}
	if free := g.Memory - g.Used; c.DeviceMemory == 0 || c.DeviceMemory > free {
		c.DeviceMemory = free
	}
	c.Outside[graph.Device], c.Outside[graph.Host] = g.OutsideBytes(), gpus.HostOutsideBytes
	c.LocalRanks = f.nodeSize
	c.Target = graph.CUDATarget()
	return nil
}

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

// calibrateCPU measures this machine and keeps the result for later plans.
func (f *Flags) calibrateCPU(ctx context.Context, c *spillway.Config) error {
	cal, err := calibration.Measure(ctx, calibration.Options{Threads: c.ComputeThreads(), Disk: c.Disk, BesideDisk: host.DiskProcs.BesideDisk})
	if err != nil {
		return cli.Fault(err)
	}
	f.CPU, f.Rates = spillway.Hardware{Machine: cal.Machine}, "as calibrated just now"
	if path, err := calibration.Keep(cal); err == nil {
		f.Rates += ", kept in " + path
	} else {
		f.Rates += "; " + err.Error()
	}
	return nil
}

// OverTransport takes what bench comm has measured of how the ranks meet.
func (f *Flags) overTransport(ranks int) error {
	if err := checkLinks(f.transport); err != nil {
		return err
	}
	var note string
	if f.CPU, note = overTransport(f.CPU, strings.ToLower(f.transport), ranks); note != "" {
		f.Rates += "; " + note
	}
	return nil
}

// readMeasurements takes what doctor has measured of this machine, for a plan of
// its own GPUs.
func (f *Flags) readMeasurements(disk string) {
	f.memory = calibration.MemoryBandwidth()
	if disk == "" {
		return
	}
	if t, err := store.LoadTuning(disk); err == nil {
		f.diskRead, f.diskWrite = t.ReadBytesPerSec, t.WriteBytesPerSec
	}
}

// measured replaces a preset's rates of the host by measured ones, of which each
// of a node's ranks has its share.
func (f *Flags) measured(m *cost.Machine, ranks int) {
	n := float64(max(ranks, 1))
	if f.memory > 0 {
		m.HostMemory = f.memory / n
	}
	if f.diskRead > 0 && f.diskWrite > 0 {
		m.DiskRead, m.DiskWrite = f.diskRead/n, f.diskWrite/n
	}
}

// Hardware is what the time is predicted on.
func (f *Flags) Hardware(c *spillway.Config) spillway.Hardware {
	if f.gpuFound == nil {
		return f.CPU
	}
	g, node := *f.gpuFound, f.nodeSize
	if !f.countInNodes {
		node = gpus.NodeGPUs // more ranks than asked for fill nodes too
	}
	hw := spillway.Hardware{HalfPrecision: g.Rates.BF16 > 0 || g.Rates.FP16 > 0, HostShare: f.hostShare(g), Machine: func(ranks int) *cost.Machine {
		m := g.Machine(min(node, ranks))
		f.measured(m, min(node, ranks))
		return m
	}}
	if c.DeviceMemory == g.Memory-g.Used { // a cap of one's own stays
		for _, o := range gpus.List() {
			if o.Memory > g.Memory {
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

// outputs refuses files that cannot be written, before time is spent on what
// goes into them. What a file holds stays until there is a plan.
func (f *Flags) outputs() error {
	if err := checkDump(f.dump); f.dump != "" && err != nil {
		return err
	}
	if f.htmlPath == "-" {
		return errors.New("--html -: the page goes to a file, not to stdout; give its name")
	}
	for _, o := range []struct{ flag, path string }{{"json", f.jsonPath}, {"html", f.htmlPath}} {
		if o.path == "" || o.path == "-" {
			continue
		}
		_, err := os.Stat(o.path)
		isNew := errors.Is(err, os.ErrNotExist)
		if err := os.MkdirAll(filepath.Dir(o.path), 0o755); err != nil {
			return fmt.Errorf("--%s: %w", o.flag, err)
		}
		file, err := os.OpenFile(o.path, os.O_CREATE|os.O_WRONLY, 0o644)
		if err == nil {
			err = file.Close()
		}
		if err != nil {
			return fmt.Errorf("--%s: %w", o.flag, err)
		}
		if isNew {
			if err := os.Remove(o.path); err != nil {
				return fmt.Errorf("--%s: %w", o.flag, err)
			}
		}
	}
	return nil
}

// nothingFits tells about the configuration as requested, and refuses it with
// what the search has found. Of a global batch, the request is the split that
// came nearest.
func (f *Flags) nothingFits(ctx context.Context, c spillway.Config, none *spillway.NothingFits, globalBatch int, out io.Writer) error {
	if globalBatch > 0 && none.Smallest != nil {
		c.Batch, c.Accum = none.Smallest.Config.Batch, none.Smallest.Config.Accum
	}
	f.hopeless = true
	var refused *plan.DoesNotFit
	if err := runPlan(ctx, c, f, nil, out); err != nil && !errors.As(err, &refused) {
		return err
	}
	return none
}

// runPlan plans all four stages, tells about them, and refuses what does not fit.
func runPlan(ctx context.Context, c spillway.Config, f *Flags, best *spillway.Fitted, stdout io.Writer) error {
	hw := f.Hardware(&c)
	stages, err := forecastStages(ctx, c, hw)
	if err != nil {
		return err
	}
	if f.dump != "" {
		if err := dumpPasses(ctx, stages[c.Zero].Config, f.dump); err != nil {
			return err
		}
	}
	asked := stages[c.Zero]
	r := planReport{flags: f, stages: stages, asked: asked, best: best}
	if r.order, err = asked.OrderCost(ctx, hw.Machine(c.Ranks)); err != nil {
		return err
	}
	chosen := best != nil || f.hopeless
	text := f.jsonPath != "-"
	// The document has no ways out: where a recommendation doesn't come from them, they are searched for people alone.
	if !asked.Fits && (text || f.htmlPath != "" || !chosen) {
		found := f.searching("it does not fit; searching for what would make it fit …")
		r.ways, r.noWay = spillway.WaysOut(ctx, asked, hw)
		found()
	}
	if !chosen {
		r.recommend(ctx, c, hw)
	}
	if err := ctx.Err(); err != nil {
		return err // what was found is not all there is
	}
	if text {
		if err := r.print(stdout); err != nil {
			return err
		}
	}
	if f.jsonPath != "" {
		doc, err := f.planJSON(asked, stages, r.best)
		if err != nil {
			return err
		}
		if f.jsonPath == "-" {
			if _, err := stdout.Write(doc); err != nil {
				return err
			}
		} else if err := cli.WriteNew(f.jsonPath, doc); err != nil {
			return fmt.Errorf("--json: %w", err)
		}
	}
	if f.htmlPath != "" {
		page, err := r.html()
		if err == nil {
			err = cli.WriteNew(f.htmlPath, page)
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
	c.Zero, c.Batch, c.Accum, c.AccumOrder, c.Prefetch, c.Recompute, c.Offload, c.Precision = b.Zero, b.Batch, b.Accum, b.AccumOrder, b.Prefetch, b.Recompute, b.Offload, b.Precision
	if best.Caps[graph.Device] > 0 {
		c.DeviceMemory = best.Caps[graph.Device]
	}
	if best.Caps[graph.Host] > 0 {
		c.HostMemory = best.Caps[graph.Host]
	}
}

// recommendation is what a person is told to run: flags, to be copied, or words in their
// place, and lines about them.
type recommendation struct {
	flags, words string
	lines        []string
}

// fittedText says what the search chose, and why.
func (f *Flags) fittedText(best *spillway.Fitted) *recommendation {
	return &recommendation{flags: cli.FlagText(best.Choices), lines: append([]string{fmt.Sprintf("the fastest by prediction of %d configurations planned: %s a step and %s",
		best.Tried, f.seconds(best.Step.Seconds), f.speed(best.TokensPerSecond()))}, cli.FlaggedAll(best.Reasons)...)}
}

func (rec *recommendation) print(w io.Writer) {
	if rec.flags != "" {
		cli.WrapFlags(w, "recommended: ", "  ", rec.flags)
	} else {
		cli.Wrap(w, "", "  ", "recommended: "+rec.words)
	}
	for _, line := range rec.lines {
		cli.Wrap(w, "  ", "    ", line)
	}
}

// printFitted prints what the search chose, and why.
func printFitted(w io.Writer, best *spillway.Fitted) { (&Flags{}).fittedText(best).print(w) }

// recommend looks for the fastest configuration of the same rows of a step, ranks and
// layout, and of the same micro-batch, unless --global-batch leaves that open. Where what
// was asked for does not fit, the ways out have searched what is left open of the same
// precision and micro-batch already.
func (r *planReport) recommend(ctx context.Context, c spillway.Config, hw spillway.Hardware) {
	given := spillway.Fixed{Precision: r.flags.precisionGiven, Accum: r.flags.accumGiven}
	free := c
	free.Recompute, free.Offload, free.GlobalBatch = "none", "", 0
	if r.asked.Fits || hw.Prefer != precision.FP32 || r.flags.openRows > 0 {
		found := r.flags.searching("searching for the fastest configuration that fits …")
		best, err := spillway.Fit(ctx, free, given, r.flags.openRows, hw)
		found()
		if err == nil {
			r.best = best
			return
		}
	}
	if !r.asked.Fits {
		for _, way := range r.ways {
			if way.Cost == "" && (r.best == nil || way.Forecast.TokensPerSecond() > r.best.TokensPerSecond()) {
				r.best = &spillway.Fitted{Forecast: way.Forecast, Choices: way.Changes, Reasons: planner.Reasons(way.Forecast)}
				if why := planner.OtherBits(&c, &way.Forecast.Config); why != "" {
					r.best.Reasons = append(r.best.Reasons, why)
				}
			}
		}
	}
}

// recommended sets the recommended configuration beside the requested one; nil:
// there is none.
func (r *planReport) recommended() *recommendation {
	asked, best := r.asked, r.best
	if best == nil {
		return nil
	}
	if r.flags.chosen {
		return r.flags.fittedText(best)
	}
	f := r.flags
	took := fmt.Sprintf("%s a step and %s predicted", f.seconds(best.Step.Seconds), f.speed(best.TokensPerSecond()))
	switch ratio := best.TokensPerSecond() / asked.TokensPerSecond(); {
	case asked.Fits && ratio < 1.005:
		return &recommendation{words: fmt.Sprintf("as requested; nothing found is faster (%s a step, %s predicted)", f.seconds(asked.Step.Seconds), f.speed(asked.TokensPerSecond())),
			lines: cli.Reasons(asked)[:1]}
	case asked.Fits:
		took += fmt.Sprintf(", against %s as requested (%.2f × as fast)", f.seconds(asked.Step.Seconds), ratio)
	default:
		took += fmt.Sprintf("; as requested it does not fit, and would take %s", f.seconds(asked.Step.Seconds))
	}
	return &recommendation{flags: cli.FlagText(best.Choices), lines: append([]string{took}, cli.FlaggedAll(best.Reasons)...)}
}

// forecastStages plans a configuration at stages 0 to 3, two at a time: a plan
// of thousands of layers takes memory of its own.
func forecastStages(ctx context.Context, c spillway.Config, hw spillway.Hardware) ([]*spillway.Forecast, error) {
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
			stages[z], errs[z] = spillway.Predict(ctx, one, hw.Machine(one.Ranks))
		})
	}
	wg.Wait()
	if errs[c.Zero] != nil {
		return nil, errs[c.Zero]
	}
	return stages, errors.Join(errs...)
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
