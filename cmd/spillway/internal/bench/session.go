package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/calibration"
	"github.com/spillway-ml/spillway/cluster"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/here"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/host"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/options"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/planning"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/zero"
)

// session runs configurations in turn, for several rounds.
type session struct {
	progress       io.Writer
	rounds, warmup int
	self           string // the path of this program
	base           int64  // resident bytes of a process of this program before planning
	machine        Machine
	yard           map[int]*yardstick // by number of ranks, run before and after each job; nil: none
	jobs           []*job
	stopped        error // a signal ended the session after at least one run
}

// job is a measured configuration.
type job struct {
	Row
	argv, env []string
	last      outcome
	within    int64 // the sum of the device's and the host's caps in bytes; 0: not both are capped
}

// runs reports whether there is a program to run.
func (j *job) runs() bool { return j.Missing == "" && len(j.argv) > 0 }

// prepare measures the values that all rows share.
func (s *session) prepare(ctx context.Context, args []string, calibrate bool) (err error) {
	s.base = statusBytes(os.Getpid(), "VmRSS:")
	if s.self, err = host.Executable(); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	c, err := configOf(args)
	if err != nil {
		return err
	}
	threads := c.ComputeThreads()
	says := cli.NewProgress(s.progress)
	defer says.End()
	if kept, _ := calibration.Kept(threads); kept == nil && calibrate && !strings.EqualFold(c.Device, "cuda") {
		fmt.Fprintln(s.progress, "measuring this CPU for predicted times, once …")
		says.Says("measuring this CPU …")
		if err := here.Calibrate(ctx, &c); err != nil {
			return err
		}
	}
	says.Later("measuring the peak of this CPU …")
	peak, err := calibration.MeasurePeak(threads)
	says.End()
	if err != nil {
		return err
	}
	if _, err := calibration.KeepPeak(peak); err != nil { // the runs' metrics read it
		fmt.Fprintln(s.progress, "warning:", err)
	}
	s.machine = Machine{CPU: peak.CPU, Cores: threads, SIMD: level.Current().String(), Peak: peak.PerS, Day: time.Now().UTC().Format(time.DateOnly), Version: cli.VersionText()}
	return nil
}

func (s *session) rows() (list []*Row) {
	for _, j := range s.jobs {
		list = append(list, &j.Row)
	}
	return list
}

// add plans a configuration of train and adds it to the jobs.
func (s *session) add(ctx context.Context, name, vary string, args []string) error {
	c, err := configOf(args)
	if err != nil {
		return err
	}
	says := cli.NewProgress(s.progress)
	says.Later("planning " + name + " …")
	f, rates, err := predict(ctx, c, cluster.InProc)
	says.End()
	if err != nil {
		return err
	}
	if s.machine.Rates == "" {
		s.machine.Rates = rates
	}
	j := &job{Row: newRow(name, vary, f)}
	if c.DeviceMemory > 0 && c.HostMemory > 0 {
		j.within = c.DeviceMemory + c.HostMemory
	}
	j.Command = append([]string{"spillway", "train"}, args...)
	j.argv = append([]string{s.self, "train", "--checkpoint=none", "--metrics=/dev/stdout"}, args...)
	if refused := f.Plan.Fit(); refused != nil {
		j.Missing = refused.Error()
	}
	s.jobs = append(s.jobs, j)
	return nil
}

// predict plans a configuration for this machine; rates is the source of the predicted times.
func predict(ctx context.Context, c spillway.Config, transport string) (f *spillway.Forecast, rates string, err error) {
	hw, onDevice, err := spillway.DeviceHardware(c)
	if err != nil {
		return nil, "", err
	}
	rates = "the GPU's rates"
	if !strings.EqualFold(c.Device, "cuda") {
		if hw, rates, err = planning.OfRun(here.Machine{}, &c, transport); err != nil {
			return nil, "", err
		}
	}
	f, err = planner.Predict(ctx, onDevice, hw.Machine(c.Ranks))
	return f, rates, err
}

// newRow returns a row with the values that are known before the runs.
func newRow(name, vary string, f *spillway.Forecast) Row {
	c, p := &f.Config, f.Plan
	use := p.Layout.Spaces[graph.Device]
	r := Row{Version: rowVersion, Name: name, Vary: vary, By: "spillway " + cli.VersionText(), Zero: c.Zero, Model: c.Model, Precision: c.PrecisionName(),
		Ranks: c.Ranks, Batch: c.Batch, Seq: c.Seq, Accum: c.Accum, PlannedBytes: use.Peak,
		ByClass: map[string]int64{}, ClassPeak: map[string]int64{}, Sent: map[string]int64{}, Predicted: &f.Step.Seconds}
	for class := range graph.NumClasses {
		r.ByClass[class.String()], r.ClassPeak[class.String()] = use.ByClass[class], use.ClassPeak[class]
	}
	if sec := p.Program.SectionOf(graph.SectionStep, graph.FormWhole); sec != nil {
		for i := range sec.Phases {
			for k := range sec.Phases[i].Ops {
				op := &sec.Phases[i].Ops[k]
				if n := plan.OpCommBytes(p.Program, op); n > 0 {
					r.Sent[string(op.Kind)] += n * int64(sec.Phases[i].Repeat)
				}
			}
		}
	}
	var flat int64
	for i := range p.Program.Units {
		flat += p.Program.Units[i].FlatLen
	}
	r.Textbook = textbook(*c, flat)
	for _, n := range r.Textbook {
		r.TextbookBytes += n
	}
	return r
}

// measure runs all configurations. If it is interrupted after the first run, it sets stopped; rows
// without a run are then missing.
func (s *session) measure(ctx context.Context) error {
	err := s.runRounds(ctx)
	if errors.Is(err, context.Canceled) && slices.ContainsFunc(s.jobs, func(j *job) bool { return len(j.Rounds) > 0 }) {
		s.stopped, err = err, nil
		for _, j := range s.jobs {
			if j.runs() && len(j.Rounds) == 0 {
				j.Missing = "its first run had not ended"
			}
		}
	}
	if err != nil {
		return err
	}
	for _, j := range s.jobs {
		if j.runs() {
			j.finish(j.last, s.warmup)
		}
		j.Row.Machine, j.Row.Warmup = s.machine, s.warmup
	}
	return nil
}

// runRounds runs all rounds, every second one in reverse order.
func (s *session) runRounds(ctx context.Context) error {
	cli.Shelter() // until the end: after a signal the running process ends and the results so far are written
	says, began, done := cli.NewProgress(s.progress), time.Now(), 0
	defer says.End()
	total := 0
	for _, j := range s.jobs {
		if j.runs() {
			total += s.rounds
		}
	}
	for round := range s.rounds {
		order := slices.Clone(s.jobs)
		if round%2 == 1 {
			slices.Reverse(order)
		}
		for _, j := range order {
			if !j.runs() {
				continue
			}
			left := ""
			if done > 0 {
				left = fmt.Sprintf(", about %v left", (time.Since(began) / time.Duration(done) * time.Duration(total-done)).Round(time.Second))
			}
			show := func(l stepLine) {
				says.Says(fmt.Sprintf("round %d of %d, %s, after step %d%s …", round+1, s.rounds, j.Name, l.Step, left))
			}
			show(stepLine{})
			err := s.round(ctx, j, show)
			if errors.Is(err, context.Canceled) {
				return cli.Interrupted(fmt.Sprintf("interrupted in round %d, in %s", round+1, j.Name))
			}
			if err != nil {
				return fmt.Errorf("%s: %w", j.Name, err)
			}
			done++
		}
	}
	return nil
}

// runOnce runs a configuration once. One that turns out not to fit is missing from then on.
func (s *session) runOnce(ctx context.Context, j *job, show func(stepLine)) error {
	o, err := runProgram(ctx, j.argv, j.env, show)
	if end, ok := errors.AsType[*failed](err); ok {
		if end.status == cli.ExitDoesNotFit || j.Vary != "" && end.status == cli.ExitBadInput {
			j.Missing = end.text
			return nil
		}
		if end.status == cli.ExitFault {
			return cli.Fault(err)
		}
	}
	if err != nil {
		return err
	}
	if o.done.Missing != "" {
		j.Missing = o.done.Missing
		return nil
	}
	if len(o.steps) == 0 {
		return errors.New("it wrote no step")
	}
	if j.last.done.SHA256 != o.done.SHA256 && len(j.last.steps) > 0 {
		return fmt.Errorf("two runs of the same command ended with different parameters: %s and %s", j.last.done.SHA256, o.done.SHA256)
	}
	if o.done.By != "" {
		j.By = o.done.By
	}
	j.last = o
	j.take(o, s.warmup)
	each := o.done.Resident // as reported by the program
	if each == 0 && o.resident > 0 {
		each = max(0, o.resident-s.base) / int64(j.Ranks)
	}
	j.ResidentBytes = max(j.ResidentBytes, each)
	return nil
}

// textbook returns the bytes that a rank sends in a step by the ZeRO paper's section 7, by
// collective, in the run's precision. flat is the number of elements of padded flat parameters.
// Stage 0 all-reduces; stages 1 and 2 reduce-scatter and all-gather the parameters once; stage 3
// reduce-scatters and all-gathers twice. Reductions count once for each micro-step that reduces,
// the gathers of stage 3 once for each micro-step; in layer order each counts once.
func textbook(c spillway.Config, flat int64) map[string]int64 {
	s, ranks := zero.Stage(c.Zero), int64(c.Ranks)
	micro := int64(1)
	if (s.ShardsGrads() || c.Reproducible) && !strings.EqualFold(c.AccumOrder, "layer") {
		micro = int64(c.Accum)
	}
	in32 := flat / ranks * (ranks - 1) * 4
	gather := in32
	if !strings.EqualFold(c.Precision, "fp32") {
		gather /= 2
	}
	reduce := gather
	if strings.EqualFold(c.Reduce, "fp32") {
		reduce = in32
	}
	scatter, all, sum := string(graph.ReduceScatter), string(graph.AllGather), string(graph.AllReduce)
	switch {
	case s.ShardsParams():
		return map[string]int64{all: 2 * gather * micro, scatter: reduce * micro}
	case s.ShardsStates():
		return map[string]int64{all: gather, scatter: reduce * micro}
	case c.Reproducible: // every micro-step's leaves are exchanged, and their fp32 sum is gathered once
		return map[string]int64{all: in32, scatter: reduce * micro}
	}
	return map[string]int64{sum: 2 * reduce * micro}
}

// configOf parses train's flags as train does.
func configOf(args []string) (c spillway.Config, err error) {
	fs := pflag.NewFlagSet("train", pflag.ContinueOnError)
	var l options.Later
	options.Train(fs, &c, &l)
	if err = fs.Parse(args); err != nil {
		return c, err
	}
	if _, err = options.Settle(fs, &c, &l); err != nil {
		return c, err
	}
	return c, l.Follow(fs, &c, io.Discard)
}

// with returns args with flags in place of those of the same names.
func with(args []string, flags ...string) []string {
	for _, f := range flags {
		name, _, _ := strings.Cut(strings.TrimPrefix(f, "--"), "=")
		args = append(without(args, name), f)
	}
	return args
}

// without returns args without the named flags.
func without(args []string, flags ...string) []string {
	return slices.DeleteFunc(slices.Clone(args), func(a string) bool {
		name, _, _ := strings.Cut(strings.TrimPrefix(a, "--"), "=")
		return slices.Contains(flags, name)
	})
}
