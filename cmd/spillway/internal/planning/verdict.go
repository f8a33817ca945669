package planning

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/dustin/go-humanize/english"

	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
)

// verdictLines is the most lines of a verdict.
const verdictLines = 15

// answer is the configuration that a person is told to run.
type answer struct {
	plan    *planner.Forecast
	changes []string // "--name", "value", in place of the request's; nil: it is the request
}

// answer returns what to run and how it stands to the request; nil where nothing fits.
func (r *planReport) answer() (a *answer, says string) {
	asked, best := r.asked, r.best
	over := ""
	if refused, ok := errors.AsType[*plan.DoesNotFit](asked.Plan.Fit()); ok {
		over = fmt.Sprintf("does not fit as requested (%s of %s memory over the cap)", plan.Bytes(refused.Peak+refused.Outside-refused.Capacity), refused.Space)
	}
	switch {
	case r.flags.chosen:
		return &answer{best.Forecast, cli.ArgsOf(best.Choices)}, fmt.Sprintf("fits; the fastest by prediction of %d configurations planned:", best.Tried)
	case asked.Fits && best == nil: // the effort was used up
		return &answer{asked, nil}, "fits as requested; nothing else was planned:"
	case asked.Fits && best.TokensPerSecond() < sameSpeed*asked.TokensPerSecond():
		return &answer{asked, nil}, "fits as requested, and nothing found is faster:"
	case asked.Fits:
		return &answer{best.Forecast, cli.ArgsOf(best.Choices)}, fmt.Sprintf("fits as requested; this is %.2f × as fast:", best.TokensPerSecond()/asked.TokensPerSecond())
	case best != nil:
		return &answer{best.Forecast, cli.ArgsOf(best.Choices)}, over + "; this fits:"
	case len(r.ways) > 0:
		way := r.ways[0]
		return &answer{way.Forecast, cli.ArgsOf(way.Changes)}, fmt.Sprintf("%s; this fits, for %s:", over, cmp.Or(way.Cost, "another time"))
	}
	return nil, over + "; nothing tried makes it fit, see the end"
}

// sameSpeed is the ratio of speeds below which two plans are told to be equally fast.
const sameSpeed = 1.005

// where names the devices of a plan.
func (f *Flags) where(c *config.Config) string {
	if f.gpuFound == nil {
		return english.Plural(c.Ranks, "CPU rank", "")
	}
	return fmt.Sprintf("%d × %s", c.Ranks, f.gpuFound.Name)
}

// verdict prints the answer in at most verdictLines lines: whether it fits, a command, memory,
// time and speed.
func (r *planReport) verdict(w io.Writer) {
	c := r.asked.Config
	a, says := r.answer()
	var first, table strings.Builder
	cli.Wrap(&first, "", "  ", fmt.Sprintf("%s on %s %s", c.Model, r.flags.where(&c), says))
	r.figures(&table, a)
	if a == nil {
		fmt.Fprint(w, first.String(), table.String())
		return
	}
	var wrapped strings.Builder
	command, refused := r.flags.command(&a.plan.Config, a.changes)
	cli.WrapFlags(&wrapped, "  ", "    ", command)
	if refused != nil {
		cli.Wrap(&first, "  ", "  ", "planned only: "+cli.Flagged(refused.Error()))
	}
	if strings.Count(first.String()+wrapped.String()+table.String(), "\n") > verdictLines {
		wrapped.Reset()
		fmt.Fprintln(&wrapped, "  "+command)
	}
	fmt.Fprint(w, first.String(), wrapped.String(), table.String())
}

// figures prints memory, time and speed of the answer and, where they differ, the request.
func (r *planReport) figures(w io.Writer, a *answer) {
	plans, head := []*planner.Forecast{r.asked}, []string{"as requested"}
	if a != nil {
		plans[0] = a.plan
		if head[0] = "recommended"; a.changes != nil && !r.flags.chosen {
			plans, head = append(plans, r.asked), append(head, "as requested")
		}
	}
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	if len(plans) > 1 {
		fmt.Fprintln(tw, "  \t"+strings.Join(head, "\t"))
	}
	for _, row := range r.figureRows(plans) {
		fmt.Fprint(tw, "  ", row.name)
		for _, p := range plans {
			fmt.Fprint(tw, "\t", row.cell(p))
		}
		fmt.Fprintln(tw)
	}
	tw.Flush()
	if line := r.flags.budgetText(plans[0]); line != "" {
		cli.Wrap(w, "  ", "    ", line)
	}
}

// figureRows are the lines of the verdict's table, and of the page's.
func (r *planReport) figureRows(plans []*planner.Forecast) (rows []stepRow) {
	for s := range graph.NumSpaces {
		used := s != graph.Disk
		for _, p := range plans {
			used = used || p.Plan.Layout.Spaces[s].Peak > 0
		}
		if used {
			rows = append(rows, stepRow{s.String() + " memory", func(p *planner.Forecast) string { return r.flags.filled(p, s) }})
		}
	}
	return append(rows,
		stepRow{"step", func(p *planner.Forecast) string { return r.flags.step(p) }},
		stepRow{"tokens/s", func(p *planner.Forecast) string {
			return strings.TrimSuffix(r.flags.speed(p), " tokens/s")
		}})
}

// filled is what a rank takes of a space, of how much.
func (f *Flags) filled(p *planner.Forecast, s graph.Space) string {
	text, limit := plan.Bytes(p.Plan.Layout.Spaces[s].Peak+p.Plan.Config.Outside[s]), p.Plan.Config.Capacity[s]
	if limit == 0 && s == graph.Host && f.gpuFound != nil {
		limit = f.hostShare(*f.gpuFound) // as assumed of its server
	}
	if limit == 0 {
		return text
	}
	return text + " of " + plan.Bytes(limit)
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

// outputs are the flags of plan that say where the answer goes.
// What --calibrate measures is in the document, too.
var outputs = map[string]bool{"json": true, "html": true, "dump": true, "emit": true, "calibrate": true}

// asked are the request's arguments.
func (f *Flags) asked() []string {
	args := []string{"plan"}
	for _, g := range f.given {
		args = append(args, g.words()...)
	}
	return args
}

// question is the same without its outputs.
func (f *Flags) question() []string {
	q := Flags{given: slices.DeleteFunc(slices.Clone(f.given), func(g setFlag) bool { return outputs[g.name] })}
	return q.asked()
}

// command is what runs a configuration: train, or the plan again where train refuses it, and why
// it does.
func (f *Flags) command(c *config.Config, changes []string) (text string, refused error) {
	if refused = f.runnable(*c); refused != nil {
		again := *f
		if f.answer != nil {
			again.given = slices.DeleteFunc(slices.Clone(f.given), func(g setFlag) bool { return g.name == "ask" })
			changes = append(slices.Clone(f.answer.given), changes...)
		}
		return "spillway " + planner.Shell(cli.WithFlags(again.question(), changes)), refused
	}
	env := cluster.Env{World: 1}
	args := cli.WithFlags(f.trainArgs(c, "DATA"), trainable(changes))
	switch nodes := f.servers(c); {
	case nodes > 1:
		args = cli.WithFlags(args, []string{"--ranks", ""}) // srun says how many
		return fmt.Sprintf("srun --nodes=%d --ntasks-per-node=%d spillway ", nodes, f.nodeSize) + planner.Shell(args[:len(args)-2]), nil
	case f.gpuFound == nil && c.Ranks > 1 && strings.EqualFold(f.transport, cluster.SHM):
		env = cluster.Env{Source: cluster.Launch, World: c.Ranks / max(c.LocalRanks, 1)}
	case f.gpuFound == nil && c.Ranks > 1 && strings.EqualFold(f.transport, cluster.MPI):
		env = cluster.Env{Source: cluster.OpenMPI, World: c.Ranks / max(c.LocalRanks, 1)}
	}
	return cli.WholeCommand(env, c.Ranks, max(c.LocalRanks, 1), args, nil), nil
}

// servers is how many servers the ranks are on.
func (f *Flags) servers(c *config.Config) int {
	n := max(1, f.nodeSize)
	return (c.Ranks + n - 1) / n
}

// runnable says why train does not run a configuration on the planned device; nil: it does. What
// train says to do about it is left out: the question is about that device.
func (f *Flags) runnable(c config.Config) error {
	if f.gpuFound == nil {
		return nil
	}
	if f.gpuFound.Arch == gpus.CDNA3 {
		return errors.New("--device cuda runs on NVIDIA's GPUs alone")
	}
	c.Device = "cuda"
	err := cmp.Or(c.Runnable(), planner.Runnable(&c), c.Validate())
	if err == nil {
		return nil
	}
	why, _, _ := strings.Cut(err.Error(), "; ")
	return errors.New(why)
}

// trainable are the changes that train has flags for.
func trainable(changes []string) (out []string) {
	known, keep := options.TrainSet(), false
	for _, word := range changes { // a flag, or its value
		if name, is := strings.CutPrefix(word, "--"); is {
			keep = known.Lookup(name) != nil
		}
		if keep {
			out = append(out, word)
		}
	}
	return out
}

// trainArgs are the request's flags as train takes them, with data where they name none.
func (f *Flags) trainArgs(c *config.Config, data string) []string {
	known := options.TrainSet()
	args := []string{"train"}
	for _, g := range f.given {
		switch g.name {
		case "fit", "allow", "transport", "device", "ranks": // chosen, or below
			continue
		}
		if known.Lookup(g.name) != nil {
			args = append(args, g.words()...)
			if g.name == "data" {
				data = ""
			}
		}
	}
	if c.Ranks > 1 {
		args = append(args, "--ranks", fmt.Sprint(c.Ranks))
	}
	if f.gpuFound != nil {
		args = append(args, "--device", "cuda")
	}
	if f.nodeMemory > 0 {
		args = cli.WithFlags(args, []string{"--host-memory", fmt.Sprint(c.HostMemory)})
	}
	if data != "" {
		args = append(args, "--data", data)
	}
	return args
}
