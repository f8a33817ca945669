// Package calibration measures this machine to predict times. It trains small models, times their
// operations, collectives, copies and the disk tier, and stores the results in the user's
// configuration folder, by machine.
package calibration

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/train"
	"github.com/spillway-ml/spillway/zero"
)

type trained struct {
	config     string
	batch, seq int
	change     func(*config.Config)
}

// calibrationModels are the models that a calibration trains with AdamW. Together they have every
// kind of operation of both model families, each in several sizes.
var calibrationModels = []trained{
	{`{"model_type":"gpt2","n_layer":1,"n_head":4,"n_embd":192,"vocab_size":512,"n_positions":512}`, 2, 64, nil},
	{`{"model_type":"gpt2","n_layer":1,"n_head":8,"n_embd":512,"vocab_size":4096,"n_positions":512}`, 2, 128, nil},
	{`{"model_type":"gpt2","n_layer":1,"n_head":4,"n_embd":256,"vocab_size":1024,"n_positions":512}`, 2, 256, nil},
	{`{"model_type":"llama","hidden_size":256,"intermediate_size":704,"num_hidden_layers":1,"num_attention_heads":4,"vocab_size":2048,"max_position_embeddings":512}`, 2, 128, nil},
	{`{"model_type":"llama","hidden_size":384,"intermediate_size":1024,"num_hidden_layers":1,"num_attention_heads":6,"vocab_size":512,"max_position_embeddings":512}`, 1, 256, nil},
	{`{"model_type":"llama","hidden_size":128,"intermediate_size":352,"num_hidden_layers":1,"num_attention_heads":2,"vocab_size":1024,"max_position_embeddings":512}`, 2, 64, nil},
}

// models returns the models to train: calibrationModels, two of them also in 16 and 8 bits, and one
// for each update rule with operations that no earlier rule has.
func models() []trained {
	list := slices.Clone(calibrationModels)
	for _, m := range []trained{calibrationModels[1], calibrationModels[3]} {
		for _, in := range []func(*config.Config){
			func(c *config.Config) { c.Precision = "bf16" },
			func(c *config.Config) { c.Precision = "fp16" },
			func(c *config.Config) { c.Precision, c.Int8 = "bf16", []string{"matmul"} },
		} {
			m.change = in
			list = append(list, m)
		}
	}
	seen := zero.Optimizer{Name: config.Default().Optimizer}.Operations()
	for _, name := range zero.OptimizerNames() {
		ops := zero.Optimizer{Name: name}.Operations()
		if slices.ContainsFunc(ops, func(op *graph.Operation) bool { return !slices.Contains(seen, op) }) {
			seen = append(seen, ops...)
			list = append(list, trained{smallModel, 1, 64, func(c *config.Config) { c.Optimizer, c.Dropout, c.Clip = name, 0.1, 1 }})
		}
	}
	return list
}

const smallModel = `{"model_type":"gpt2","n_layer":1,"n_head":4,"n_embd":256,"vocab_size":512,"n_positions":128}`

// calibrationRanks are runs with as many ranks as there are threads, and with twice as many. They
// show the time of collectives in addition to their rates. The models of the first list are so
// small that most of that is a time for each collective, in which ranks wait for each other. The
// models of the second list show the time for each byte: the sent data is in no cache, or in
// another core's.
var calibrationRanks = [2][]trainedBy{
	{
		{`{"model_type":"gpt2","n_layer":3,"n_head":2,"n_embd":64,"vocab_size":512,"n_positions":64}`, 0},
		{`{"model_type":"gpt2","n_layer":3,"n_head":2,"n_embd":64,"vocab_size":512,"n_positions":64}`, 2},
		{`{"model_type":"llama","hidden_size":64,"intermediate_size":176,"num_hidden_layers":3,"num_attention_heads":2,
		"vocab_size":512,"max_position_embeddings":64}`, 3},
	},
	{
		{`{"model_type":"gpt2","n_layer":3,"n_head":4,"n_embd":256,"vocab_size":512,"n_positions":64}`, 1},
		{`{"model_type":"gpt2","n_layer":3,"n_head":4,"n_embd":256,"vocab_size":512,"n_positions":64}`, 3},
	},
}

type trainedBy struct {
	config string
	zero   int
}

// calibrationSteps is the number of steps that each model runs. The first step touches its memory
// for the first time and is not counted. Times are means, not medians: on a machine with other
// work, a step includes all its delays.
const calibrationSteps = 7

// Options configure Measure.
type Options struct {
	Threads int // computing threads; 0: all
	// Ranks, if not 0, is the number of concurrent runs, each with Threads threads on separate
	// cores. The calibration is then that of a job of that many processes. It does not include the
	// ranks' waiting time (see Waiting). 0: as many runs as there are threads.
	Ranks int
	Disk  string // the folder of the disk tier; "": a temporary one
	// BesideDisk is called before the disk is measured, and its result afterwards. A program can
	// set up its process there as for a run with a disk tier. nil: no call.
	BesideDisk func() (after func())

	// Passes is how often everything is measured, one pass after the other. The rates are fitted
	// to all passes, since the speed of a shared machine changes within minutes. 0: once.
	Passes int

	steps int // number of steps of each model, in a test; 0: calibrationSteps, and waitSteps
}

// Measure measures this machine's CPU device. It trains small models for a few steps, first on all
// threads and then several at a time, and times every operation. Then it measures collectives,
// copies, and the disk tier. It takes a few seconds and leaves no files.
func Measure(ctx context.Context, o Options) (_ *cost.Calibration, err error) {
	dir, err := os.MkdirTemp("", "spillway-calibrate-")
	if err != nil {
		return nil, fmt.Errorf("calibrate: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	cfg := config.Default()
	cfg.Threads = o.Threads
	threads := cfg.ComputeThreads()
	together := cmp.Or(o.Ranks, threads)
	cfg.Data = filepath.Join(dir, "tokens.bin")
	if err := calibrationTokens(cfg.Data); err != nil {
		return nil, fmt.Errorf("calibrate: %w", err)
	}
	jobs, err := modelJobs(cfg, dir, o.steps)
	if err != nil {
		return nil, fmt.Errorf("calibrate: %w", err)
	}
	var samples cost.Samples
	var lead []leads
	for range max(1, o.Passes) {
		for _, one := range jobs {
			l, err := timedModel(ctx, one, together, &samples)
			if err != nil {
				return nil, fmt.Errorf("calibrate: %w", err)
			}
			lead = append(lead, l)
		}
		if err := timedTransfers(ctx, threads, o, &samples); err != nil {
			return nil, fmt.Errorf("calibrate: %w", err)
		}
	}
	c := cost.Fit(together, samples)
	c.Start, c.Gap, c.Handoff = meanLeads(lead)
	if o.Ranks > 0 {
		return c, nil
	}
	wait := func(ranks int) (cost.Rate, error) {
		ranks = min(ranks, maxCalibrationRanks)
		cfg.Ranks = ranks
		return waiting(ctx, cfg, c.Machine(ranks), dir, cmp.Or(o.steps, waitSteps), stepsHere)
	}
	if threads > 1 {
		c.Wait, err = wait(threads)
	}
	if err == nil {
		c.Crowded, err = wait(2 * threads)
	}
	if err != nil {
		return nil, fmt.Errorf("calibrate: %w", err)
	}
	return c, nil
}

// modelJobs writes the models into dir, and returns the jobs that train them for steps steps; 0
// means calibrationSteps.
func modelJobs(cfg config.Config, dir string, steps int) (jobs []config.Config, err error) {
	for i, m := range models() {
		one := cfg
		one.Model = filepath.Join(dir, fmt.Sprint("m", i))
		one.Batch, one.Seq, one.Zero, one.Steps = m.batch, m.seq, 0, cmp.Or(steps, calibrationSteps)
		if m.change != nil {
			m.change(&one)
		}
		if err := calibrationModel(one.Model, m.config); err != nil {
			return nil, err
		}
		jobs = append(jobs, one)
	}
	return jobs, nil
}

// timedModel adds the times of a job's operations: of one run alone, and of together runs at a
// time.
func timedModel(ctx context.Context, c config.Config, together int, s *cost.Samples) (leads, error) {
	alone, l, err := timedSteps(ctx, c)
	if err != nil {
		return l, err
	}
	core := alone
	if together > 1 {
		if core, err = timedTogether(ctx, c, together); err != nil {
			return l, err
		}
	}
	s.Alone, s.Core = append(s.Alone, alone...), append(s.Core, core...)
	return l, nil
}

// stepsHere trains in this process, and returns the mean time of a step, in s.
func stepsHere(ctx context.Context, c config.Config) (float64, error) {
	t, err := train.New(ctx, c)
	if err != nil {
		return 0, err
	}
	var walls []float64
	if err := errors.Join(t.Run(ctx, func(r train.StepResult) error { walls = append(walls, r.Seconds); return nil }), t.Close()); err != nil {
		return 0, err
	}
	return mean(walls[1:]), nil
}

// Steps runs a job and returns the time of a step, in s.
type Steps func(context.Context, config.Config) (float64, error)

// Waiting returns the time of collectives between a job's ranks in addition to their rates. All
// other rates of machine must be measured. steps is called with small jobs of ranks ranks.
func Waiting(ctx context.Context, machine *cost.Machine, ranks int, steps Steps) (wait cost.Rate, err error) {
	dir, err := os.MkdirTemp("", "spillway-calibrate-")
	if err != nil {
		return wait, fmt.Errorf("calibrate: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	cfg := config.Default()
	cfg.Data, cfg.Ranks, cfg.Threads = filepath.Join(dir, "tokens.bin"), ranks, 1
	if err := calibrationTokens(cfg.Data); err != nil {
		return wait, fmt.Errorf("calibrate: %w", err)
	}
	if wait, err = waiting(ctx, cfg, machine, dir, waitSteps, steps); err != nil {
		return wait, fmt.Errorf("calibrate: %w", err)
	}
	return wait, nil
}

// waiting returns the rate with which the predicted steps of each list of calibrationRanks take, in
// sum, their measured time. Each job runs n steps.
func waiting(ctx context.Context, cfg config.Config, machine *cost.Machine, dir string, n int, steps Steps) (wait cost.Rate, err error) {
	m := *machine
	m.Wait = wait
	for k, list := range calibrationRanks {
		var programs []*graph.Program
		measured := 0.0
		for i, of := range list {
			one := cfg
			one.Model = filepath.Join(dir, fmt.Sprint("r", k, i))
			one.Batch, one.Seq, one.Zero, one.Steps = 1, 64, of.zero, n
			if err := calibrationModel(one.Model, of.config); err != nil {
				return wait, err
			}
			f, err := planner.Predict(ctx, one, machine)
			if err != nil {
				return wait, err
			}
			programs = append(programs, f.Plan.Program)
			took, err := steps(ctx, one)
			if err != nil {
				return wait, err
			}
			measured += took
		}
		if err := addWait(programs, &m, waitParts[k], measured); err != nil {
			return wait, err
		}
	}
	return m.Wait, nil
}

// Yardstick writes a small model and tokens into a folder. It returns a job that trains the model
// over the given number of ranks of one thread each. Its step time shows the machine's current
// speed.
func Yardstick(dir string, ranks int) (config.Config, error) {
	of, c := calibrationRanks[1][0], config.Default()
	c.Model, c.Data, c.Ranks, c.Threads = filepath.Join(dir, "yardstick"), filepath.Join(dir, "tokens.bin"), ranks, 1
	c.Batch, c.Seq, c.Zero, c.Steps = 1, 64, of.zero, waitSteps
	if err := errors.Join(calibrationModel(c.Model, of.config), calibrationTokens(c.Data)); err != nil {
		return c, fmt.Errorf("calibrate: %w", err)
	}
	return c, nil
}

// waitParts is the kind of rate that each list of calibrationRanks shows.
var waitParts = [2]cost.Rate{{PerOp: 1}, {PerByte: 1}}

// addWait adds a multiple of part to a machine's Wait, so that the programs' steps take the given
// seconds in sum by prediction. It adds nothing if they take longer without any.
func addWait(programs []*graph.Program, m *cost.Machine, part cost.Rate, seconds float64) error {
	from, times := m.Wait, 0.0
	// Computation hides a part of each wait, so the first estimates are too short.
	for range waitEstimates {
		predicted, parts := 0.0, 0.0
		for _, p := range programs {
			run, err := cost.Simulate(p, "step", m)
			if err != nil {
				return err
			}
			predicted += run.Seconds
			for i := range run.Trace.Steps {
				if op := run.Trace.Op(i); cost.IsCollective(op) {
					parts += part.Of(cost.SizeOf(p, op))
				}
			}
		}
		times = max(0, times+(seconds-predicted)/parts)
		m.Wait = cost.Rate{PerOp: from.PerOp + times*part.PerOp, PerByte: from.PerByte + times*part.PerByte}
	}
	return nil
}

const (
	waitSteps     = 30
	waitEstimates = 8
)

const maxCalibrationRanks = 17

func mean(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	sum := 0.0
	for _, x := range v {
		sum += x
	}
	return sum / float64(len(v))
}

func calibrationModel(folder, config string) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(folder, "config.json"), []byte(config), 0o644)
}

func calibrationTokens(path string) error {
	r := rand.New(rand.NewPCG(1, 2))
	tokens := make([]byte, 2*65536) // little-endian uint16 below 512: in every vocabulary
	for i := 0; i < len(tokens); i += 2 {
		v := r.IntN(512)
		tokens[i], tokens[i+1] = byte(v), byte(v>>8)
	}
	return os.WriteFile(path, tokens, 0o644)
}

// timedTogether runs n copies of a configuration concurrently, with one thread each.
func timedTogether(ctx context.Context, c config.Config, n int) ([]cost.Sample, error) {
	c.Threads = 1
	all, errs := make([][]cost.Sample, n), make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { all[i], _, errs[i] = timedSteps(ctx, c) })
	}
	wg.Wait()
	return slices.Concat(all...), errors.Join(errs...)
}

// leads are times between operations, in s: of a step before its first and after its last
// operation; between two operations of a stream; and from the end of an operation to the start of
// one on another stream that waited for it.
type leads struct{ start, gap, handoff []float64 }

func meanLeads(all []leads) (start, gap, handoff float64) {
	var sum leads
	for _, l := range all {
		sum.start, sum.gap, sum.handoff = append(sum.start, l.start...), append(sum.gap, l.gap...), append(sum.handoff, l.handoff...)
	}
	return mean(sum.start), mean(sum.gap), mean(sum.handoff)
}

// timedSteps runs a configuration of one rank with a trace. It returns each size of operation of
// the step with its mean time, and the times between operations.
func timedSteps(ctx context.Context, c config.Config) (samples []cost.Sample, l leads, err error) {
	dir, err := os.MkdirTemp(filepath.Dir(c.Model), "trace-")
	if err != nil {
		return nil, l, err
	}
	c.Trace = filepath.Join(dir, "trace.json")
	t, err := train.New(ctx, c)
	if err != nil {
		return nil, l, err
	}
	p := t.Plan().Program
	var walls []float64
	if err := errors.Join(t.Run(ctx, func(r train.StepResult) error { walls = append(walls, r.Seconds); return nil }), t.Close()); err != nil {
		return nil, l, err
	}
	text, err := os.ReadFile(c.Trace)
	if err != nil {
		return nil, l, err
	}
	var doc struct {
		TraceEvents []traceEvent `json:"traceEvents"`
	}
	if err := json.Unmarshal(text, &doc); err != nil {
		return nil, l, fmt.Errorf("trace: %w", err)
	}
	sec := p.Section("step")
	ops := map[string]*graph.Op{}
	for i := range sec.Phases {
		for k := range sec.Phases[i].Ops {
			ops[sec.Phases[i].Name+"/"+sec.Phases[i].Ops[k].Name] = &sec.Phases[i].Ops[k]
		}
	}
	type key struct {
		class cost.Class
		size  cost.Size
	}
	times := map[key][]float64{}
	seen := map[*graph.Op]int{}
	type span struct{ from, to float64 }
	steps := make([]span, len(walls))
	for i := range steps {
		steps[i].from = math.Inf(1)
	}
	var last [graph.NumStreams]float64
	for _, e := range doc.TraceEvents {
		op := ops[e.Args.Phase+"/"+e.Name]
		if e.Ph != "X" || e.Args.Section != "step" || op == nil {
			continue
		}
		step := seen[op] // each runs once a step
		seen[op]++
		from, to := e.Ts/1e6, (e.Ts+e.Dur)/1e6
		steps[step].from, steps[step].to = min(steps[step].from, from), max(steps[step].to, to)
		if step > 0 {
			k := key{cost.ClassOf(p, op), cost.SizeOf(p, op)}
			times[k] = append(times[k], to-from)
			if len(op.Wait) == 0 && last[op.Stream] > steps[step].from {
				l.gap = append(l.gap, from-last[op.Stream])
			}
		}
		last[op.Stream] = to
	}
	for i, s := range steps {
		if i > 0 {
			l.start = append(l.start, walls[i]-(s.to-s.from))
		}
	}
	for k, all := range times {
		samples = append(samples, cost.Sample{Class: k.class, Size: k.size, Seconds: mean(all)})
	}
	slices.SortFunc(samples, compareSamples) // maps are unordered
	return samples, l, nil
}

type traceEvent struct {
	Name string  `json:"name"`
	Ph   string  `json:"ph"`
	Ts   float64 `json:"ts"`  // µs
	Dur  float64 `json:"dur"` // µs
	Args struct {
		Section string `json:"section"`
		Phase   string `json:"phase"`
	} `json:"args"`
}

func compareSamples(a, b cost.Sample) int {
	return cmp.Or(cmp.Compare(a.Class, b.Class), cmp.Compare(a.Size.Flops, b.Size.Flops), cmp.Compare(a.Size.Bytes, b.Size.Bytes))
}
