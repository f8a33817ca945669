package planning

import (
	"strings"

	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/internal/published"
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

// setFlag is a flag as it was given, on the command line or in a file.
type setFlag struct {
	name, value string
	toggle      bool // its name alone means true
}

func (s setFlag) words() []string {
	switch {
	case s.toggle && s.value == "true":
		return []string{"--" + s.name}
	case s.toggle:
		return []string{"--" + s.name + "=" + s.value}
	}
	return []string{"--" + s.name, s.value}
}

// ownStack is the --stack that calibrates nothing.
const ownStack = "spillway"

// Bind makes the flags that train does not have.
func (f *Flags) Bind(fs *pflag.FlagSet, c *config.Config) {
	fs.StringVar(&f.gpu, "gpu", "", "plan for GPU `NAME` (--list-gpus), or detect for this machine's own")
	fs.StringVar(&f.stack, "stack", "",
		"predict the time of `SOFTWARE`: "+strings.Join(published.Stacks, ", ")+", calibrated to its published runs, "+
			"with their 80 % interval; or "+ownStack+", not calibrated, with the range of all "+
			"(with --gpu; default \""+ownStack+"\")")
	fs.IntVar(&f.nodes, "nodes", 1, "servers; ranks are --nodes times --gpus-per-node")
	fs.IntVar(&f.gpusPerNode, "gpus-per-node", 1, "GPUs of a server")
	options.MeshFlags(fs, c)
	fs.IntVar(&c.ShardSize, "shard-size", 0, "shard over groups of `N` ranks and replicate over the groups (HSDP; in "+
		"bf16 and fp16 with last bits of its own; default: shard over all)")
	fs.Var(cli.Size(&f.nodeMemory), "node-memory", "memory of a server, which its ranks share "+
		"(default with --gpu: that of a usual server; only recommendations are held to it)")
	fs.StringVar(&f.from, "from", "", "plan again as for the plan in `FILE`, which --json has written, for the same "+
		"machine; flags given now override its own")
	fs.StringVar(&f.jsonPath, "json", "", "write the plan as JSON to `FILE`, - for stdout")
	fs.StringVar(&f.htmlPath, "html", "", "write the plan as a page with memory timelines to `FILE`")
	fs.StringVar(&f.emit, "emit", "", "write the job of the plan to standard output in place of the report, slurm or "+
		"jobset (Kubernetes), with its memory as request and limit; what is not given is chosen, as with --fit")
	fs.StringVar(&f.dump, "dump", "", "write the program after each pass, and what the pass changed, into the new "+
		"folder `DIR`")
	fs.BoolVar(&f.calibrate, "calibrate", false, "measure this machine's CPU for about half a minute first, for the "+
		"predicted time, and keep the result for later plans (without --gpu)")
	fs.StringVar(&f.transport, "transport", cluster.InProc, "how CPU ranks meet, for the predicted time: inproc, shm "+
		"or mpi, as bench comm has measured it")
	fs.IntVar(&f.perProcess, "ranks-per-process", 0,
		"CPU ranks that each process runs, for its memory (default: all of them, and 1 with --transport shm or mpi)")
	fs.StringVar(&f.reference, "reference", "none", "print a formula of the literature beside the plan's "+
		"activations: none or megatron")
	fs.StringVar(&f.ask, "ask", "", "ask for the fewest gpus, the largest model (preset), batch or seq, or the least "+
		"device-memory or host-memory that fits, and show what the nearest plan of the next value lacks; what is not "+
		"given is chosen, as with --fit")
	fs.IntVar(&f.effort, "effort", 0,
		"evaluate at most `N` plans in all; more may find a faster one (default: what takes about 5 s of a "+
			"processor, at most "+
			"1000 and at least 60, which with --pipeline take up to 15 s and more)")
	fs.Float64Var(&f.tokens, "tokens", 0, "`N` tokens to train on, as in 100e9: says how many days and GPU-hours the "+
		"recommended plan takes; with --emit the job's steps are so many (without --steps and --epochs)")
	fs.Float64Var(&f.price, "price", 0, "`MONEY` for a GPU-hour: says what --tokens cost")
	fs.BoolVar(&f.listModels, "list-models", false, "list the models that --model names")
	fs.BoolVar(&f.listGPUs, "list-gpus", false, "list the GPUs that --gpu names")
}

// keep notes which flags were given, on the command line or in its file.
func (f *Flags) keep(fs *pflag.FlagSet) {
	fs.Visit(func(given *pflag.Flag) {
		if given.Name != "config" && given.Name != "from" { // their flags stand here by themselves
			value := given.Value.String()
			if given.Name == "checkpoint" && value == "" {
				value = "none" // as it is typed
			}
			f.given = append(f.given, setFlag{given.Name, value, given.NoOptDefVal == "true"})
		}
	})
}

// request is a configuration as the planner takes it.
func (f *Flags) request(c config.Config) planner.Request {
	return planner.Request{Config: c, Opened: f.opened}
}
