package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"

	"github.com/dustin/go-humanize/english"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/calibration"
	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/host"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/gpus"
	"github.com/spillway-ml/spillway/memplan/cost"
	page "github.com/spillway-ml/spillway/memplan/report"
	"github.com/spillway-ml/spillway/planner"
)

const (
	strong = "strong"
	weak   = "weak"
)

// scaleBench holds the arguments of bench scale.
type scaleBench struct {
	out            outputs
	rounds, warmup int
	calibrate      bool
	modes          []string
	ranks          int
	gpu            string
	demo           bool     // no model was given
	made           []string // the command
}

func scaleCommand() *cobra.Command {
	var c spillway.Config
	var l options.Later
	var b scaleBench
	cmd := &cobra.Command{
		Use:   "scale",
		Short: "Strong and weak scaling over processes, predicted and measured, with and without overlap",
		Long: `Train with 1, 2, … up to --ranks processes of one rank and one thread each, bound to
processors. Strong scaling has the same rows of a step at every number, weak scaling the
same rows for each rank. Every number runs twice, the second time with --overlap off, where
collectives and computation take turns. Before the runs this CPU is measured with other
models, and the predictions are printed. Rows with more ranks than processors are marked
and have no predictions.

Simulated rows follow: up to 16,384 ranks of a named GPU on the cost model alone, with
llama-3-8b if no model is given.`,
		Args: cli.NoArguments,
	}
	fs := cmd.Flags()
	options.Train(fs, &c, &l)
	b.out.flags(fs)
	fs.Lookup("svg").Usage = "write the chart of step times to `FILE`"
	roundFlags(fs, &b.rounds, &b.warmup, &b.calibrate)
	b.rounds, fs.Lookup("rounds").DefValue = scaleRounds, fmt.Sprint(scaleRounds)
	fs.Lookup("calibrate").Usage = "first measure this CPU for predicted times, about " +
		"30 s for each number of processes; false: use earlier measurements"
	fs.Var(cli.List(&b.modes, "MODE"), "mode", "strong or weak, or both separated by commas (default: both)")
	fs.StringVar(&b.gpu, "gpu", "h100-80", "GPU of the simulated ranks (plan --list-gpus); none: simulate no ranks")
	fs.Lookup("ranks").Usage = "the largest number of ranks; the others divide it"
	fs.Lookup("ranks").DefValue = "the processors"
	list := slices.DeleteFunc(slices.Clone(ofOneRun), func(f refusedFlag) bool { return f.flag == "zero" })
	list = append(list, refusedFlag{"global-batch", "; strong scaling has --batch rows for each of the most ranks"},
		refusedFlag{"batch-schedule", "; leave it out"}, refusedFlag{"rank-shares", "; leave it out"},
		refusedFlag{"overlap", " with and without; leave it out"})
	for _, f := range list {
		fs.Lookup(f.flag).Hidden = true
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		b.made, b.ranks, b.demo = given(cmd), runtime.GOMAXPROCS(0), !fs.Changed("model") && !fs.Changed("config")
		if fs.Changed("ranks") {
			b.ranks = c.Ranks
		}
		args, err := trainArgs(fs, &c, &l, func(fs *pflag.FlagSet) error {
			return refuseOfOneRun(fs, "bench scale runs several numbers of ranks", list)
		})
		if err := cmp.Or(err, b.check(&c), checkRounds(b.rounds, b.warmup, &c), b.out.check(true)); err != nil {
			return err
		}
		return b.run(cmd, args)
	}
	return cmd
}

func (b *scaleBench) check(c *spillway.Config) error {
	if len(b.modes) == 0 {
		b.modes = []string{strong, weak}
	}
	for i, m := range b.modes {
		b.modes[i] = strings.ToLower(m)
		if !slices.Contains([]string{strong, weak}, b.modes[i]) {
			return fmt.Errorf("--mode %.80q: want strong, weak, or both", m)
		}
	}
	if strings.EqualFold(c.Device, "cuda") {
		return errors.New("--device cuda: bench scale runs CPU ranks, and GPUs on the cost model; spillway train --device cuda --metrics has a run's times")
	}
	if b.ranks < 1 || b.ranks > 64 {
		return fmt.Errorf("--ranks %d: 1 to 64 processes of this machine", b.ranks)
	}
	if strings.EqualFold(b.gpu, "none") {
		return nil
	}
	_, err := gpus.Lookup(b.gpu)
	if err != nil {
		err = fmt.Errorf("--gpu: %w, or none (all: spillway plan --list-gpus)", err)
	}
	return err
}

func (b *scaleBench) run(cmd *cobra.Command, args []string) error {
	ctx, s := cmd.Context(), &session{progress: cmd.ErrOrStderr(), rounds: b.rounds, warmup: b.warmup}
	args = with(without(args, "ranks"), "--threads=1")
	if err := s.prepare(ctx, without(args, "threads"), false); err != nil {
		return err
	}
	first, err := configOf(args)
	if err != nil {
		return err
	}
	var counts []int // of ranks
	for n := 1; n <= b.ranks; n++ {
		if b.ranks%n == 0 {
			counts = append(counts, n)
		}
	}
	machines := map[int]*cost.Machine{}
	if b.calibrate {
		dir, err := os.MkdirTemp("", "spillway-yardstick-")
		if err != nil {
			return fmt.Errorf("bench: %w", err)
		}
		defer os.RemoveAll(dir)
		s.yard = map[int]*yardstick{}
		for _, n := range counts {
			if n <= runtime.GOMAXPROCS(0) {
				fmt.Fprintf(s.progress, "measuring this CPU for predicted times of %s …\n", english.Plural(n, "process", ""))
				says := cli.NewProgress(s.progress)
				says.Later("measuring this CPU …")
				if machines[n], err = s.processes(ctx, n); err == nil {
					s.yard[n], err = newYardstick(ctx, dir, n, machines[n])
				}
				if says.End(); err != nil {
					return err
				}
			}
		}
	}
	for _, mode := range b.modes {
		for _, n := range counts {
			for _, overlap := range []string{"on", "off"} {
				if n == 1 && overlap == "off" { // one rank has no collectives
					continue
				}
				if err := b.add(ctx, s, args, &first, mode, n, overlap, machines[n]); err != nil {
					return err
				}
			}
		}
	}
	model := first.Model
	if !strings.EqualFold(b.gpu, "none") {
		if model, err = b.simulate(ctx, s, args, b.demo); err != nil {
			return err
		}
	}
	predictions := "Predicted before the runs:"
	for _, r := range s.rows() {
		if r.Predicted != nil && !r.Simulated {
			predictions += fmt.Sprintf(" %s %s;", r.Name, seconds(*r.Predicted))
		}
	}
	cli.Wrap(cmd.ErrOrStderr(), "", "  ", strings.TrimSuffix(predictions, ";"))
	if cli.Keeps(b.out.json) { // a pipe gets the rows only once, at the end
		var before []Row
		for _, j := range s.jobs {
			r := j.Row
			if r.Machine = s.machine; j.runs() {
				r.Missing = "it has not run yet"
			}
			before = append(before, r)
		}
		if err := cli.WriteJSON(nil, b.out.json, before); err != nil {
			return err
		}
	}
	if err := s.measure(ctx); err != nil {
		return err
	}
	s.efficiencies()
	what := fmt.Sprintf("model %s, ZeRO-%d, micro-batch %d × %d tokens, up to %d processes of one thread",
		cli.OnOneLine(first.Model), first.Zero, first.Batch, s.rows()[0].Seq, b.ranks)
	notes := []string{s.accuracy()}
	if !strings.EqualFold(b.gpu, "none") {
		notes = append(notes, fmt.Sprintf("Simulated rows: %s on %s in servers of 8, weak scaling, on the cost model alone.",
			cli.OnOneLine(model), b.gpu))
	}
	return b.out.write(cmd, &report{title: "Scaling", what: what, session: s, tables: scaleTables, charts: scaleCharts, made: b.made, notes: slices.DeleteFunc(notes, func(n string) bool { return n == "" })})
}

// add adds a job of n ranks to the session. machine is a measurement of this one for the predicted
// time; nil: use earlier measurements.
func (b *scaleBench) add(ctx context.Context, s *session, args []string, first *spillway.Config, mode string, n int, overlap string, machine *cost.Machine) error {
	if mode == strong {
		args = with(without(args, "accum"), fmt.Sprintf("--batch=%d", first.Batch), fmt.Sprintf("--global-batch=%d", first.Batch*b.ranks*first.Accum))
	}
	args = with(args, "--overlap="+overlap)
	c, err := configOf(with(args, fmt.Sprintf("--ranks=%d", n)))
	if err != nil {
		return err
	}
	name := fmt.Sprintf("%s %d", mode, n)
	if overlap == "off" {
		name += ", no overlap"
	}
	cores := runtime.GOMAXPROCS(0)
	rates := "measured just before, for each number of processes"
	if machine == nil {
		machine, rates = known(c, n)
	}
	f, err := planner.Predict(ctx, c, machine)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	s.machine.Rates = rates
	j := &job{Row: newRow(name, "", f)}
	j.Scaling = &Scaling{Mode: mode, Overlap: overlap == "on", Oversubscribed: n > cores}
	if j.Oversubscribed {
		j.Predicted = nil
	}
	if refused := f.Plan.Fit(); refused != nil {
		j.Missing = refused.Error()
	}
	launched := []string{"launch", "-n", fmt.Sprint(n), "--", "train"}
	j.Command = slices.Concat([]string{"spillway"}, launched, args)
	j.argv = slices.Concat([]string{s.self}, launched, []string{"--checkpoint=none", "--metrics=/dev/stdout"}, args)
	s.jobs = append(s.jobs, j)
	return nil
}

// known returns a model of this machine for n processes of one thread each: the earlier measurement
// with all threads, scaled to n cores.
func known(c spillway.Config, n int) (machine *cost.Machine, rates string) {
	c.Threads = 0
	hw, _, rates := calibration.Hardware(c.ComputeThreads())
	hw, over := calibration.Over(hw, cluster.SHM, n)
	m := *hw.Machine(n)
	m.Cores, m.Sharers = n, n
	return &m, cmp.Or(rates, "rates of a typical core") + "; " + cmp.Or(over, "collectives as in one process")
}

// scalePasses is the number of measurements of the machine for each number of processes. With
// single passes on a shared machine, predictions of GPT-2's step on two processes varied from 3.97
// to 4.86 s.
const scalePasses = 4

// scaleRounds keeps the default run under three minutes on two cores.
const scaleRounds = 4

// processes measures this machine as n processes of one thread and one core each find it:
// computation, collectives over shared memory, and the time lost by waiting for each other. It uses
// models other than the predicted ones.
func (s *session) processes(ctx context.Context, n int) (*cost.Machine, error) {
	c, err := calibration.Measure(ctx, calibration.Options{Threads: 1, Ranks: n, Passes: scalePasses, BesideDisk: host.DiskProcs.BesideDisk})
	if err != nil {
		return nil, cli.Fault(err)
	}
	machine := c.Machine(n)
	if n == 1 {
		return machine, nil
	}
	if _, err := runProgram(ctx, s.launched(n, "bench", "comm", "--max-bytes=16MiB"), nil, nil); err != nil {
		return nil, err
	}
	links, _ := calibration.Links(cluster.SHM, n)
	if l := cost.NearestLinks(links, cluster.SHM, n); l != nil {
		machine = l.On(machine)
	}
	machine.Wait, err = calibration.Waiting(ctx, machine, n, s.stepOf)
	return machine, err
}

// The simulated numbers of ranks, and the model if none is given.
var simulatedRanks = []int{8, 64, 512, 4096, 16384}

const (
	simulatedModel = "llama-3-8b"
	serverCards    = 8
)

// simulate adds weak scaling over GPUs, on the cost model. It returns the model's name.
func (b *scaleBench) simulate(ctx context.Context, s *session, args []string, demo bool) (string, error) {
	g, err := gpus.Lookup(b.gpu)
	if err != nil {
		return "", err
	}
	if demo {
		args = with(without(args, "device-memory"), "--model="+simulatedModel, "--seq=4096", "--batch=1",
			"--precision=bf16", "--recompute=selective", "--tokenizer=bytes")
	}
	c, err := configOf(args)
	if err != nil {
		return "", err
	}
	c.Target, c.LocalRanks, c.Threads = graph.CUDATarget(), serverCards, 0
	c.Outside[graph.Device], c.Outside[graph.Host] = g.OutsideBytes(), gpus.HostOutsideBytes
	for _, n := range simulatedRanks {
		for _, overlap := range []string{"on", "off"} {
			c.Ranks, c.Overlap = n, overlap
			f, err := planner.Predict(ctx, c, g.Machine(serverCards))
			if err != nil {
				return "", fmt.Errorf("%d simulated ranks: %w", n, err)
			}
			j := &job{Row: newRow(fmt.Sprintf("%d × %s", n, g.Name), "", f)}
			if overlap == "off" {
				j.Name += ", no overlap"
			}
			j.By, j.Scaling = "simulated", &Scaling{Mode: weak, Overlap: overlap == "on", Simulated: true}
			j.TokensPerS = float64(c.StepRows()*f.Config.Seq) / f.Step.Seconds
			s.jobs = append(s.jobs, j)
		}
	}
	return c.Model, nil
}

// efficiencies sets the values that follow from the times: the efficiency of each row against the
// one with the fewest ranks of its mode, with overlap.
func (s *session) efficiencies() {
	time := func(r *Row) float64 {
		if r.Simulated {
			return *r.Predicted
		}
		return r.StepSecondsMedian
	}
	base := map[string]*Row{}
	for _, r := range s.rows() {
		if r.Missing != "" {
			continue
		}
		if !r.Simulated {
			r.Seconds = &r.StepSecondsMedian
		}
		r.atSpeed()
		key := fmt.Sprint(r.Mode, r.Simulated)
		if base[key] == nil {
			base[key] = r
		}
		e := time(base[key]) / time(r)
		if r.Mode == strong {
			e *= float64(base[key].Ranks) / float64(r.Ranks)
		}
		r.Efficiency = &e
	}
}

// accuracy formats the errors of the predictions.
func (s *session) accuracy() string {
	text := ""
	for _, by := range []struct {
		what string
		of   func(*Row) *float64
	}{{"measured step", func(r *Row) *float64 { return r.Seconds }}, {"step at the predicted speed", func(r *Row) *float64 { return r.AtSpeed }}} {
		var off []float64
		for _, r := range s.rows() {
			if t := by.of(r); r.Predicted != nil && t != nil {
				off = append(off, max(*r.Predicted / *t, *t / *r.Predicted)-1)
			}
		}
		if len(off) > 0 {
			text += fmt.Sprintf("Predicted against %s, of %s: off by %s in the median, by %s at worst. ",
				by.what, english.Plural(len(off), "row", ""), percent(quantile(off, 0.5)), percent(slices.Max(off)))
		}
	}
	return strings.TrimSuffix(text, " ")
}

// scaleTables are the tables of bench scale.
var scaleTables = []table{
	{"Scaling", nil, []column{
		{"step s", func(r *Row, _ float64) string { return optional(r.Seconds, digits) }},
		{"p10", func(r *Row, _ float64) string { return whereMeasured(r, r.P10) }},
		{"p90", func(r *Row, _ float64) string { return whereMeasured(r, r.P90) }},
		{"predicted", func(r *Row, _ float64) string { return optional(r.Predicted, digits) }},
		{"at speed", func(r *Row, _ float64) string { return optional(r.AtSpeed, digits) }},
		{"tokens/s", func(r *Row, _ float64) string { return fmt.Sprintf("%.0f", r.TokensPerS) }},
		{"efficiency", func(r *Row, _ float64) string { return optional(r.Efficiency, percent) }},
		{"hidden", func(r *Row, _ float64) string { return optional(r.HiddenShare, percent) }},
		{"", func(r *Row, _ float64) string {
			switch {
			case r.Oversubscribed:
				return "over"
			case r.Simulated:
				return "sim"
			}
			return ""
		}}},
		"Strong: the same rows of a step at every number of ranks; weak: as many for each rank. " +
			"At speed: the measured step times the machine's speed, which is the predicted over the measured step " +
			"of another model, the yardstick, before and after each round. " +
			"Over: more ranks than processors, and no prediction. Sim: on the cost model alone."},
}

func whereMeasured(r *Row, v float64) string {
	if r.Simulated {
		return "–"
	}
	return digits(v)
}

// scaleCharts draws times with predictions, and efficiency.
func scaleCharts(r *report) []*page.Bars {
	colours := map[bool]page.Series{true: {Name: "overlap", Colour: "#0072b2"}, false: {Name: "no overlap", Colour: "#d55e00"}}
	series := []page.Series{colours[true], colours[false]}
	values := func(row *Row, v float64) []float64 {
		if row.Overlap {
			return []float64{v, 0}
		}
		return []float64{0, v}
	}
	times := &page.Bars{Title: "Time of a step, measured", Series: series, Text: seconds, Mark: "predicted"}
	simulated := &page.Bars{Title: "Time of a step, simulated", Series: series, Text: seconds}
	efficiency := &page.Bars{Title: "Efficiency", Series: series, Text: percent}
	for _, row := range r.ran() {
		if row.Simulated {
			simulated.Bars = append(simulated.Bars, page.Bar{Name: row.Name, Values: values(row, *row.Predicted)})
		} else {
			bar := page.Bar{Name: row.Name, Values: values(row, row.StepSecondsMedian)}
			if row.Predicted != nil {
				bar.Mark = *row.Predicted
			}
			times.Bars = append(times.Bars, bar)
		}
		efficiency.Bars = append(efficiency.Bars, page.Bar{Name: row.Name, Values: values(row, *row.Efficiency)})
	}
	return []*page.Bars{times, efficiency, simulated}
}
