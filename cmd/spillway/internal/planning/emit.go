package planning

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"text/template"
	"time"

	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
)

// Forms of --emit.
const (
	slurm  = "slurm"
	jobSet = "jobset"
)

// Defaults of a job for settings that the request does not give.
const (
	cpusPerRank = 4 // cores
	cpusPerGPU  = 8
	jobData     = "/data/tokens.bin"
	jobRuns     = "/runs"
	jobScratch  = "/scratch"
	jobHours    = 24
)

var (
	//go:embed slurm.sh.tmpl
	slurmText string
	//go:embed jobset.yaml.tmpl
	jobSetText string

	jobTemplates = template.Must(template.Must(
		template.New(slurm).Funcs(template.FuncMap{"quote": quoted, "shell": shellLines}).Parse(slurmText),
	).New(jobSet).Parse(jobSetText))
)

// quoted returns a string as YAML.
func quoted(s string) (string, error) {
	text, err := json.Marshal(s)
	return string(text), err
}

// shellLines quotes words for a shell, with one flag a line.
func shellLines(args []string) string {
	return strings.ReplaceAll(planner.Shell(args), " --", " \\\n  --")
}

// checkEmit rejects requests for a job that cannot be written.
func (f *Flags) checkEmit(fs *pflag.FlagSet, c *config.Config) error {
	if f.emit == "" {
		return nil
	}
	f.emit = strings.ToLower(f.emit)
	switch refuse := func(format string, args ...any) error {
		return fmt.Errorf("--emit %.80s"+format, append([]any{f.emit}, args...)...)
	}; {
	case f.emit != slurm && f.emit != jobSet:
		return refuse(": use slurm or jobset")
	case f.jsonPath == "-":
		return refuse(" with --json -: both write to standard output; give --json a file")
	case !f.countInNodes:
		return refuse(": it is not said on which servers; give --nodes N --gpus-per-node N, with --gpu NAME for GPUs")
	case f.emit == jobSet && f.nodes > 1:
		return refuse(" with --nodes %d: the pods of a JobSet have nothing to meet by across servers; give --nodes "+
			"1, --emit slurm, or write an MPIJob (examples/cluster/mpijob.yaml)", f.nodes)
	case fs.Changed("transport"):
		return refuse(" with --transport %s: the form of the job says how ranks meet; leave --transport out",
			f.transport)
	}
	for _, length := range []string{"steps", "epochs"} {
		if f.tokens > 0 && fs.Changed(length) {
			return fmt.Errorf("--emit %s: --tokens %g with --%s %s: each says how long the run is; leave one out", f.emit,
				f.tokens, length, fs.Lookup(length).Value)
		}
	}
	if err := f.runnable(*c); err != nil {
		return fmt.Errorf("--emit %s: train does not run the plan: %w", f.emit, err)
	}
	switch { // so that the plan counts the processes
	case f.emit == slurm:
		f.transport, c.LocalRanks = cluster.MPI, 1
	case f.gpuFound == nil:
		f.transport, c.LocalRanks = cluster.SHM, 1
	}
	return f.settleProcesses(c)
}

// job holds the values for the templates.
type job struct {
	About   []string // lines of a comment
	Nodes   int
	Ranks   int // of a server
	CPUs    int // of a server
	GPUs    int // of a server; 0: none
	MiB     int64
	Memory  string // explains MiB
	Time    string // Slurm's form
	Args    []string
	Scratch bool // the plan uses a disk
	Saves   bool // the job saves checkpoints and resumes from them
}

// PerTask returns the number of cores of a rank.
func (j job) PerTask() int { return max(1, j.CPUs/j.Ranks) }

// writeJob writes the job of the answer, a plan that fits.
func (r *planReport) writeJob(w io.Writer, a *answer) error {
	f, c := r.flags, &a.plan.Config
	j := job{Nodes: f.nodes, Ranks: f.gpusPerNode, CPUs: cpusPerRank * f.gpusPerNode,
		Scratch: a.plan.Plan.Layout.Spaces[graph.Disk].Peak > 0}
	j.MiB, j.Memory = f.serverMiB(a.plan)
	if f.gpuFound != nil {
		j.GPUs, j.CPUs = f.gpusPerNode, cpusPerGPU*f.gpusPerNode
	}
	var about strings.Builder
	host := a.plan.Plan.Layout.Spaces[graph.Host].Peak + a.plan.Plan.Config.Outside[graph.Host]
	cli.Wrap(&about, "", "", fmt.Sprintf("%s on %s, as spillway plan has planned it: "+
		"a rank takes %s of device memory and %s of host memory, a step %s, %s.",
		cli.OnOneLine(c.Model), f.where(c), f.filled(a.plan, graph.Device), plan.Bytes(host), f.step(a.plan), f.speed(a.plan)))
	j.About = strings.Split(strings.TrimSpace(about.String()), "\n")
	args := cli.WithFlags(f.trainArgs(c, jobData), trainable(a.changes))
	j.Args = f.jobArgs(args, a.plan, &j)
	return jobTemplates.ExecuteTemplate(w, f.emit, j)
}

// serverMiB returns the memory limit for a server's ranks and a text that explains it. It is the
// plan's memory plus an eighth and 64 MiB for memory that the plan does not count, such as buffers
// of MPI and a launcher, but at most the server's memory.
func (f *Flags) serverMiB(p *planner.Forecast) (mib int64, what string) {
	spaces := []graph.Space{graph.Device, graph.Host}
	if f.gpuFound != nil {
		spaces = spaces[1:]
	}
	n, has := int64(f.gpusPerNode)*planner.InMemory(p.Plan, spaces), f.nodeMemory
	if f.server != nil {
		has = int64(f.gpusPerNode) * f.server.Memory
	}
	if mib = (n+n/8)>>20 + 64; n > has || mib<<20 <= has {
		return mib, "what its ranks take by the plan, and an eighth and 64 MiB more"
	}
	return has >> 20, fmt.Sprintf("all that it has. Its ranks take %d MiB by the plan", n>>20)
}

// jobArgs returns train's arguments in a job. It saves checkpoints and resumes from them, except
// with --checkpoint none.
func (f *Flags) jobArgs(args []string, p *planner.Forecast, j *job) []string {
	set, c := options.TrainSet(), &p.Config
	_ = set.Parse(args[1:]) // never fails: they were parsed before
	add := func(name, value string) { args = cli.WithFlags(args, []string{"--" + name, value}) }
	drop := func(name string) { add(name, ""); args = args[:len(args)-2] }
	if set.Changed("threads") { // a process is bound to this number of cores
		j.CPUs = c.Threads
		drop("threads")
	}
	if f.emit == slurm || f.gpuFound == nil {
		drop("ranks") // the launcher sets the number
	}
	steps := c.Steps
	if f.tokens > 0 {
		steps = int(min(math.Ceil(f.tokens/(float64(c.StepRows())*float64(c.Seq))), 1<<53))
		add("steps", fmt.Sprint(steps))
	}
	j.Time = f.timeLimit(p, steps, set.Changed("epochs"))
	dir := set.Lookup("checkpoint").Value.String()
	if j.Saves = dir != "" || !set.Changed("checkpoint"); j.Saves {
		if dir == "" {
			add("checkpoint", path.Join(jobRuns, filepath.Base(c.Model)))
		}
		if !set.Changed("save-every") {
			add("save-every", "100")
		}
		if !set.Changed("resume") {
			args = append(args, "--resume")
		}
	}
	if f.emit == slurm {
		return args
	}
	f.mount(set, add)
	if f.gpuFound != nil {
		return args
	}
	launch := []string{"launch", fmt.Sprintf("--ranks=%d", f.gpusPerNode)}
	if !j.Saves {
		return append(append(launch, "--"), args...)
	}
	launch = append(launch, "--restarts=8")
	if c.Reproducible && c.GlobalBatch > 0 {
		launch = append(launch, "--min-ranks=1")
	}
	return append(append(launch, "--"), args...)
}

// mount moves paths to the volumes of the pod: inputs, outputs, and the disk tier.
func (f *Flags) mount(set *pflag.FlagSet, add func(name, value string)) {
	value := func(name string) string { return set.Lookup(name).Value.String() }
	var read, written []string
	for _, name := range []string{"model", "init", "data", "eval-data", "tokenizer", "template"} {
		v := value(name)
		switch _, err := model.LookupPreset(v); {
		case v == "" || name == "model" && err == nil || name == "init" && strings.EqualFold(v, "random"):
		case name == "tokenizer" && (strings.EqualFold(v, "bytes") || strings.EqualFold(v, "gpt2")):
		default:
			read = append(read, name)
		}
	}
	for _, name := range []string{"checkpoint", "metrics", "receipt", "trace", "tensorboard", "export"} {
		if value(name) != "" {
			written = append(written, name)
		}
	}
	onto := func(folder string, flags []string) {
		var sources []string
		for _, name := range flags {
			sources = append(sources, value(name))
		}
		for i, name := range mounted(sources) {
			add(flags[i], path.Join(folder, name))
		}
	}
	onto(path.Dir(jobData), read)
	onto(jobRuns, written)
	if v := value("disk"); v != "" {
		size := ""
		if at := strings.LastIndexByte(v, ':'); at >= 0 {
			if _, err := cli.ParseSize(v[at+1:]); err == nil {
				size = v[at:]
			}
		}
		add("disk", jobScratch+size)
	}
}

// mounted returns names for paths in one folder. Different paths get different names: if the last
// element is not unique, the folder's name precedes it, and a number if needed.
func mounted(paths []string) (names []string) {
	of, ends, taken := map[string]string{}, map[string]int{}, map[string]bool{}
	for i, p := range paths {
		paths[i] = filepath.Clean(p)
		if !slices.Contains(paths[:i], paths[i]) {
			ends[filepath.Base(p)]++
		}
	}
	for _, single := range []bool{true, false} { // unique names first; they stay as they are
		for _, p := range paths {
			name := filepath.Base(p)
			if of[p] != "" || single != (ends[name] == 1) {
				continue
			}
			if in := filepath.Base(filepath.Dir(p)); !single && in != "." && in != string(filepath.Separator) {
				name = in + "-" + name
			}
			free := name
			for n := 2; taken[free]; n++ {
				free = fmt.Sprintf("%d-%s", n, name)
			}
			of[p], taken[free] = free, true
		}
	}
	for _, p := range paths {
		names = append(names, of[p])
	}
	return names
}

// timeLimit returns the upper end of the predicted time plus a quarter and half an hour, in Slurm's
// form.
func (f *Flags) timeLimit(p *planner.Forecast, steps int, unknown bool) string {
	hours := int64(jobHours)
	if !unknown {
		high := 1.0
		if t := f.timeRange(p); t != nil {
			high = t.High
		}
		s := float64(1.25*high*p.Step.Seconds*float64(steps)) + (30 * time.Minute).Seconds()
		hours = int64(math.Ceil(min(s, 1e9) / 3600))
	}
	return fmt.Sprintf("%d-%02d:00:00", hours/24, hours%24)
}
