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

// Flags holds the flags of `spillway plan` that train does not have, and values derived from them.
type Flags struct {
	here                 Here               // nil: none
	page                 func([]byte) error // receives the page of --html too; nil: unused
	gpu                  string
	nodes, gpusPerNode   int
	jsonPath, htmlPath   string
	dump                 string
	listModels, listGPUs bool
	gpuFound             *gpus.GPU // the GPU of --gpu
	stack                string
	fits                 []*published.Fit // of --stack, or of all stacks
	nodeSize             int              // GPUs of a server
	countInNodes         bool             // ranks were given as nodes
	reference            string
	calibrate            bool
	from, emit           string
	machine              Machine          // the machine's data for the plan
	read, diskHere       bool             // machine is from a document; data of --disk are from here
	opened               *planner.Model   // the model of that document; nil: --model names it
	CPU                  planner.Hardware // without --gpu
	Rates                string           // the source of CPU's rates
	transport            string           // between CPU ranks
	perProcess           int              // ranks of a process; 0: not given
	chosen               bool             // --fit has chosen the configuration
	hopeless             bool             // --fit has found nothing that fits
	nodeMemory           int64            // bytes of a server's memory, as given; 0: not
	server               *gpus.Server     // assumed with --gpu if nodeMemory is not given
	given                []setFlag        // the command's flags, by name
	precisionGiven       bool
	seqGiven             bool
	openRows             int // rows of a step if --batch is not given; 0: it is
	accumGiven           bool
	tokens, price        float64 // of a complete run; 0: not given
	effort               int     // plans that may be evaluated; 0: by the job's size
	eachAlone            bool    // effort is of each search, not of all
	plans                *planner.Budget
	progress             *cli.Progress // shows work that takes seconds
	ask                  string
	answer               *Answer // to --ask; nil: it was not given
	hostMemory           int64   // --host-memory, before the cap by --node-memory
}

// setFlag is a flag and its value as given, on the command line or in a file.
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

// ownStack is the value of --stack without a calibration.
const ownStack = "spillway"

// Bind binds the flags that train does not have.
func (f *Flags) Bind(fs *pflag.FlagSet, c *config.Config) {
	fs.StringVar(&f.gpu, "gpu", "", "plan for GPU `NAME` (--list-gpus), or detect for this machine's GPU")
	fs.StringVar(&f.stack, "stack", "",
		"predict the time of `SOFTWARE`: "+strings.Join(published.Stacks, ", ")+", calibrated to its published runs, "+
			"with their 80 % interval; or "+ownStack+", not calibrated, with the range of all stacks "+
			"(with --gpu; default \""+ownStack+"\")")
	fs.IntVar(&f.nodes, "nodes", 1, "number of servers; ranks are --nodes times --gpus-per-node")
	fs.IntVar(&f.gpusPerNode, "gpus-per-node", 1, "number of GPUs of a server")
	options.MeshFlags(fs, c)
	fs.IntVar(&c.ShardSize, "shard-size", 0, "shard over groups of `N` ranks and replicate over the groups (HSDP; in "+
		"bf16 and fp16 the last bits differ from other group sizes; default: shard over all)")
	fs.Var(cli.Size(&f.nodeMemory), "node-memory", "memory of a server, shared by its ranks "+
		"(default with --gpu: a typical server's, which limits recommendations only)")
	fs.StringVar(&f.from, "from", "", "repeat the plan in `FILE`, which --json has written, for the same "+
		"machine; flags on the command line override its flags")
	fs.StringVar(&f.jsonPath, "json", "", "write the plan as JSON to `FILE`, - for stdout")
	fs.StringVar(&f.htmlPath, "html", "", "write the plan as a page with memory timelines to `FILE`")
	fs.StringVar(&f.emit, "emit", "", "write the plan's job to standard output instead of the report: slurm or "+
		"jobset (Kubernetes), with its memory as request and limit; settings that are not given are chosen as with --fit")
	fs.StringVar(&f.dump, "dump", "", "write the program after each pass, and the pass's changes, to the new "+
		"folder `DIR`")
	fs.BoolVar(&f.calibrate, "calibrate", false, "first measure this machine's CPU for about half a minute, for the "+
		"predicted time, and store the result for later plans (without --gpu)")
	fs.StringVar(&f.transport, "transport", cluster.InProc, "transport between CPU ranks, for the predicted time: inproc, shm "+
		"or mpi, as measured by bench comm")
	fs.IntVar(&f.perProcess, "ranks-per-process", 0,
		"CPU ranks of a process, for its memory (default: all, or 1 with --transport shm or mpi)")
	fs.StringVar(&f.reference, "reference", "none", "compare a formula of the literature with the plan's "+
		"activations: none or megatron")
	fs.StringVar(&f.ask, "ask", "", "find the fewest gpus, the largest model (preset), batch or seq, or the least "+
		"device-memory or host-memory that fits, and show how far the next value is from fitting; settings that are not "+
		"given are chosen as with --fit")
	fs.IntVar(&f.effort, "effort", 0,
		"evaluate at most `N` plans in total; more may find a faster one (default: as many as take about 5 s of a "+
			"processor, "+
			"60 to 1000; with --pipeline they take up to 15 s and more)")
	fs.Float64Var(&f.tokens, "tokens", 0, "`N` tokens to train on, as in 100e9: print the days and GPU-hours that the "+
		"recommended plan takes; with --emit they set the job's steps (without --steps and --epochs)")
	fs.Float64Var(&f.price, "price", 0, "`MONEY` for a GPU-hour: print the cost of --tokens")
	fs.BoolVar(&f.listModels, "list-models", false, "list the models that --model names")
	fs.BoolVar(&f.listGPUs, "list-gpus", false, "list the GPUs that --gpu names")
}

// keep records the flags that were given, on the command line or in a file.
func (f *Flags) keep(fs *pflag.FlagSet) {
	fs.Visit(func(given *pflag.Flag) {
		if given.Name != "config" && given.Name != "from" { // the flags in these files are recorded instead
			value := given.Value.String()
			if given.Name == "checkpoint" && value == "" {
				value = "none" // as typed
			}
			f.given = append(f.given, setFlag{given.Name, value, given.NoOptDefVal == "true"})
		}
	})
}

// request returns a request to the planner for a configuration.
func (f *Flags) request(c config.Config) planner.Request {
	return planner.Request{Config: c, Opened: f.opened}
}
