// Package planning is the command plan.
package planning

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/host"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/internal/published"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
)

// Flags are the flags of `spillway plan` beside train's.
type Flags struct {
	here                 Here               // nil: none
	page                 func([]byte) error // takes the page of --html beside its file; nil: nothing does
	gpu                  string
	nodes, gpusPerNode   int
	jsonPath, htmlPath   string
	dump                 string
	listModels, listGPUs bool
	gpuFound             *gpus.GPU // what --gpu names
	stack                string
	fits                 []*published.Fit // of --stack, or of all stacks
	nodeSize             int              // GPUs of a server
	countInNodes         bool             // ranks were given as nodes
	reference            string
	calibrate            bool
	from, emit           string
	machine              Machine          // what the plan takes of a machine
	read, diskHere       bool             // it is from a document; but for what is known of --disk
	opened               *planner.Model   // the model of that document; nil: --model names it
	CPU                  planner.Hardware // without --gpu
	Rates                string           // where its rates are from
	transport            string           // how its ranks meet
	perProcess           int              // ranks of a process; 0: not given
	chosen               bool             // --fit has chosen the configuration
	hopeless             bool             // --fit has found nothing that fits
	nodeMemory           int64            // bytes of a server's memory, as given; 0: not
	server               *gpus.Server     // what stands in for it, with --gpu
	given                []setFlag        // the command's flags, by name
	precisionGiven       bool
	seqGiven             bool
	openRows             int // rows of a step where --batch was left open; 0: it was not
	accumGiven           bool
	tokens, price        float64 // of a whole run; 0: not asked
	effort               int     // plans that may be evaluated; 0: by the job's size
	eachAlone            bool    // effort is of each search, not of all
	plans                *planner.Budget
	progress             *cli.Progress // says what takes seconds
	ask                  string
	answer               *Answer // to --ask; nil: it was not given
	hostMemory           int64   // --host-memory, without what --node-memory caps
}

// Command is plan on the machine here, nil for none. page, if not nil, takes each plan's page, as
// --html writes it.
func Command(here Here, page func([]byte) error) *cobra.Command {
	var c config.Config
	var l options.Later
	f := Flags{here: here, page: page}
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
	cli.Hide(fs, "checkpoint", "collectives", "cuda-graphs", "data", "data-glob", "epochs", "eval-every", "eval-split", "eval-steps", "export", "init", "keep", "long", "loss-on", "metrics", "metrics-addr", "order", "receipt", "receipt-every", "require-pinned", "resume", "save-every", "seed", "template", "tensorboard", "text-field", "timeout", "tokenizer", "trace")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		defer host.PlanHeap.Acquire()()
		out := cmd.OutOrStdout()
		f.progress = cli.NewProgress(cmd.ErrOrStderr())
		defer f.progress.End()
		if err := f.refuseMachine(fs); err != nil {
			return err
		}
		if done, err := f.withoutJob(cmd, &c); done {
			return err
		}
		if f.from != "" {
			if err := f.readFrom(fs, f.from); err != nil {
				return err
			}
		} else if path := fs.Lookup("config").Value.String(); path != "" {
			if err := cli.ApplyConfigFile(fs, path); err != nil {
				return err
			}
		}
		if err := cmp.Or(options.RefuseUnderOne(fs), l.Refuse(), cli.RefuseOverwriting(fs)); err != nil {
			return err
		}
		f.keep(fs)
		question, err := f.topicOf(fs, &c)
		if err != nil {
			return err
		}
		if err := cmp.Or(f.validateReference(), f.Settle(fs, &c)); err != nil {
			return err
		}
		if err := f.checkEmit(fs, &c); err != nil {
			return err
		}
		l.Fit = l.Fit || f.emit != ""
		if err := c.Validate(); err != nil {
			return err
		}
		if err := l.Follow(fs, &c, io.Discard); err != nil {
			return err
		}
		f.openRows = l.OpenRows(fs)
		if err := cmp.Or(f.outputs(), f.lookAround(cmd.Context(), fs, &c, cmd.ErrOrStderr())); err != nil {
			return err
		}
		c = c.Sharing()
		var best *planner.Fitted
		if question != nil {
			if c, best, err = f.answerTo(cmd.Context(), question, c, options.FixedBy(fs), l.GlobalBatch); err != nil {
				return err
			}
			takeFitted(&c, best)
			f.chosen = true
			return runPlan(cmd.Context(), c, &f, best, out)
		}
		if l.Fit {
			f.progress.Says("searching for the fastest configuration that fits …")
			best, err = f.request(c).Fit(cmd.Context(), options.FixedBy(fs), l.GlobalBatch, f.Hardware(&c))
			var none *planner.NothingFits
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

// withoutJob does what needs no job: the lists, and --calibrate alone.
func (f *Flags) withoutJob(cmd *cobra.Command, c *config.Config) (done bool, err error) {
	switch out := cmd.OutOrStdout(); {
	case f.listModels:
		return true, listModels(out)
	case f.listGPUs:
		return true, listGPUs(out)
	case f.calibrate && !slices.ContainsFunc([]string{"model", "config", "from", "ask", "gpu"}, cmd.Flags().Changed):
		return true, f.onlyCalibrate(cmd.Context(), c, out)
	}
	return false, nil
}

// keep notes which flags were given, on the command line or in its file.
func (f *Flags) keep(fs *pflag.FlagSet) {
	fs.Visit(func(given *pflag.Flag) {
		if given.Name != "config" && given.Name != "from" { // their flags stand here by themselves
			f.given = append(f.given, setFlag{given.Name, given.Value.String(), given.NoOptDefVal == "true"})
		}
	})
}

// Bind makes the flags that train does not have.
func (f *Flags) Bind(fs *pflag.FlagSet, c *config.Config) {
	fs.StringVar(&f.gpu, "gpu", "", "plan for GPU `NAME` (--list-gpus), or detect for this machine's own")
	fs.StringVar(&f.stack, "stack", "",
		"predict the time of `SOFTWARE`: "+strings.Join(published.Stacks, ", ")+", calibrated to its published runs, "+
			"with their 80 % interval; or "+ownStack+", not calibrated, with the range of all (with --gpu; default \""+ownStack+"\")")
	fs.IntVar(&f.nodes, "nodes", 1, "servers; ranks are --nodes times --gpus-per-node")
	fs.IntVar(&f.gpusPerNode, "gpus-per-node", 1, "GPUs of a server")
	options.MeshFlags(fs, c)
	fs.IntVar(&c.ShardSize, "shard-size", 0, "shard over groups of `N` ranks and replicate over the groups (HSDP; in bf16 and fp16 with last bits of its own; default: shard over all)")
	fs.Var(cli.Size(&f.nodeMemory), "node-memory", "memory of a server, which its ranks share "+
		"(default with --gpu: that of a usual server; only recommendations are held to it)")
	fs.StringVar(&f.from, "from", "", "plan again as for the plan in `FILE`, which --json has written, for the same machine; flags given now override its own")
	fs.StringVar(&f.jsonPath, "json", "", "write the plan as JSON to `FILE`, - for stdout")
	fs.StringVar(&f.htmlPath, "html", "", "write the plan as a page with memory timelines to `FILE`")
	fs.StringVar(&f.emit, "emit", "", "write the job of the plan to standard output in place of the report, slurm or jobset (Kubernetes), with its memory as request and limit; what is not given is chosen, as with --fit")
	fs.StringVar(&f.dump, "dump", "", "write the program after each pass, and what the pass changed, into the new folder `DIR`")
	fs.BoolVar(&f.calibrate, "calibrate", false, "measure this machine's CPU for a few seconds first, for the predicted time, and keep the result for later plans (without --gpu)")
	fs.StringVar(&f.transport, "transport", cluster.InProc, "how CPU ranks meet, for the predicted time: inproc, shm or mpi, as bench comm has measured it")
	fs.IntVar(&f.perProcess, "ranks-per-process", 0,
		"CPU ranks that each process runs, for its memory (default: all of them, and 1 with --transport shm or mpi)")
	fs.StringVar(&f.reference, "reference", "none", "print a formula of the literature beside the plan's activations: none or megatron")
	fs.StringVar(&f.ask, "ask", "", "ask for the fewest gpus, the largest model (preset), batch or seq, or the least device-memory or host-memory that fits, and show that the next value does not; what is not given is chosen, as with --fit")
	fs.IntVar(&f.effort, "effort", 0,
		"evaluate at most `N` plans in all; more may find a faster one (default: what takes about 5 s of a processor, at most "+
			"1000 and at least 60, which with --pipeline take up to 15 s and more)")
	fs.Float64Var(&f.tokens, "tokens", 0, "`N` tokens to train on, as in 100e9: says how many days and GPU-hours the recommended plan takes")
	fs.Float64Var(&f.price, "price", 0, "`MONEY` for a GPU-hour: says what --tokens cost")
	fs.BoolVar(&f.listModels, "list-models", false, "list the models that --model names")
	fs.BoolVar(&f.listGPUs, "list-gpus", false, "list the GPUs that --gpu names")
}

// Settle turns the flags of the hardware into ranks, caps and what is outside
// the arena.
func (f *Flags) Settle(fs *pflag.FlagSet, c *config.Config) error {
	options.FollowPipeline(fs, c)
	for _, n := range []struct {
		flag string
		v    int
	}{{"nodes", f.nodes}, {"gpus-per-node", f.gpusPerNode}} {
		if n.v < 1 {
			return fmt.Errorf("--%s %d: at least 1 is needed", n.flag, n.v)
		}
	}
	if fs.Changed("effort") && f.effort < 1 {
		return fmt.Errorf("--effort %d: at least 1 plan is needed", f.effort)
	}
	if !f.eachAlone {
		f.plans = planner.NewBudget(f.effort)
	}
	if err := f.checkBudget(); err != nil {
		return err
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
	f.precisionGiven, f.seqGiven, f.accumGiven = fs.Changed("precision"), fs.Changed("seq"), fs.Changed("accum")
	if f.gpu == "" && !f.countInNodes {
		f.nodeSize = c.Ranks // the CPU's ranks are on one machine
	}
	f.capHost(c)
	if err := f.settleProcesses(c); err != nil {
		return err
	}
	if f.gpu == "" {
		switch {
		case fs.Changed("gpu"):
			return errors.New(`--gpu "": the name of a GPU is missing; --list-gpus lists them, and detect is this machine's own`)
		case strings.EqualFold(c.Device, "cuda"):
			return errors.New("--device cuda: say which GPU to plan for: --gpu NAME (--list-gpus lists them) or --gpu detect")
		}
		return f.checkStack()
	}
	var g gpus.GPU
	var err error
	if strings.EqualFold(f.gpu, "detect") {
		if f.machine.GPU == nil {
			if f.machine.GPU, err = f.here.GPU(); err != nil {
				return fmt.Errorf("--gpu detect: %w", err)
			}
			f.readMeasurements(c.Disk)
		}
		g = *f.machine.GPU
	} else if g, err = gpus.Lookup(f.gpu); err != nil {
		return fmt.Errorf("--gpu: %w (all: spillway plan --list-gpus)", err)
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
	return f.checkStack()
}

// request is a configuration as the planner takes it.
func (f *Flags) request(c config.Config) planner.Request {
	return planner.Request{Config: c, Opened: f.opened}
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
	return cmp.Or(cli.CheckOutput("json", f.jsonPath), cli.CheckOutput("html", f.htmlPath))
}

// nothingFits tells about the configuration as requested, and refuses it with what the search has
// found. The request is the answer where it fits and the effort was used up before another one was
// planned. Of a global batch, the request is the split that came nearest.
func (f *Flags) nothingFits(ctx context.Context, c config.Config, none *planner.NothingFits, globalBatch int, out io.Writer) error {
	if globalBatch > 0 && none.Smallest != nil {
		c.Batch, c.Accum = none.Smallest.Config.Batch, none.Smallest.Config.Accum
	}
	f.hopeless = true
	err := runPlan(ctx, c, f, nil, out)
	if _, refused := errors.AsType[*plan.DoesNotFit](err); refused || err == nil && none.Smallest != nil {
		return none
	}
	return err
}

// runPlan plans all four stages, tells about them, and refuses what does not fit.
func runPlan(ctx context.Context, c config.Config, f *Flags, best *planner.Fitted, stdout io.Writer) error {
	hw := f.Hardware(&c)
	f.progress.Says("planning …")
	stages, err := f.forecastStages(ctx, c, hw)
	if err != nil {
		return err
	}
	if f.dump != "" {
		if err := dumpPasses(ctx, f.request(stages[c.Zero].Config), f.dump); err != nil {
			return err
		}
	}
	asked := stages[c.Zero]
	r := planReport{flags: f, stages: stages, asked: asked, best: best}
	if r.order, err = asked.OrderCost(ctx, hw.Machine(c.Ranks)); err != nil {
		return err
	}
	chosen := best != nil || f.hopeless
	text := f.jsonPath != "-" && f.emit == ""
	if !asked.Fits {
		f.progress.Says("it does not fit; searching for what would make it fit …")
		r.ways, r.noWay = planner.WaysOut(ctx, asked, hw)
	}
	if !chosen {
		r.recommend(ctx, c, hw)
	}
	if err := ctx.Err(); err != nil {
		return err // what was found is not all there is
	}
	f.progress.End()
	if text {
		if f.answer != nil {
			f.answer.print(stdout)
		}
		if err := r.print(stdout); err != nil {
			return err
		}
	}
	if a, _ := r.answer(); f.emit != "" && asked.Fits {
		if err := r.writeJob(stdout, a); err != nil {
			return err
		}
	}
	if f.jsonPath != "" {
		if err := cli.WriteJSON(stdout, f.jsonPath, r.doc()); err != nil {
			return err
		}
	}
	if err := r.writePage(); err != nil {
		return fmt.Errorf("--html: %w", err)
	}
	return asked.Plan.Fit()
}
