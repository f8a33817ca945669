package spillway

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/hfconfig"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/plan"
)

// Trainer runs a training job over the ranks of this process. Its methods are
// for one goroutine.
type Trainer struct {
	cfg   Config
	model hfconfig.Config
	plan  *plan.Plan

	platform platform
	pool     *pool.Pool
	ranks    []*rank
	states   *states
	disk     *store.Folder // nil: none
	prefix   *prefixCache  // of frozen layers' outputs; nil: none
	procs    bool          // the runtime has more processors for its workers
	trace    *exec.Trace

	traceFile *os.File // opened before the run, written at its end

	tokenizer data.Tokenizer
	train     *batches
	eval      *batches

	step    int   // steps done
	pending bool  // the last step's update waits for the next step, or flush
	fatal   error // after a failed step nothing else runs
	skipped skips // steps whose update was left out, with OnNonFinite "skip"
}

// rank is one rank: its executor and the goroutine that drives it, locked to
// one thread as devices with a thread's context need.
type rank struct {
	*thread
	index int
	exec  *exec.Executor
	// batch of the micro-step at hand, rows · seq
	inputs, targets []int32
}

// Write and Read move bytes between the host and the rank's buffers.
func (r *rank) Write(buf graph.BufID, off int64, data []byte) error {
	return r.do(func() error { return r.exec.Write(buf, off, data) })
}

func (r *rank) Read(buf graph.BufID, off int64, data []byte) error {
	return r.do(func() error { return r.exec.Read(buf, off, data) })
}

// close gives back what the rank has, unless it does not come to an end.
func (r *rank) close() error {
	done := make(chan error, 1)
	end := func() { done <- r.exec.Close() }
	if r.exec == nil {
		end = func() { done <- nil }
	}
	select {
	case r.work <- end:
		close(r.work)
		return <-done
	case <-time.After(2 * stopGrace):
		close(r.work)
		return fmt.Errorf("rank %d is still busy; its memory is not given back", r.index)
	}
}

// traceSpans is how many operations of a stream a trace holds; the rest is
// counted only.
const traceSpans = 1 << 16

// flush runs the update that the next step's section would begin with, where the
// plan has it so, beside that step's forward: somebody wants the states before.
func (t *Trainer) flush() error {
	if t.fatal != nil {
		return t.fatal
	}
	if !t.pending {
		return nil
	}
	err := t.each(fmt.Sprintf("the update of step %d", t.step), func(r *rank) error {
		r.exec.SetStep(int64(t.step))
		return r.exec.RunSection("flush", nil)
	})
	if err != nil {
		t.fatal = err
		return err
	}
	t.pending = false
	return nil
}

// StepResult is what a step tells.
type StepResult struct {
	Step        int     // from 1
	Loss        float32 // mean over the counted targets of the global batch
	LR          float64
	GradNorm    float64 // before clipping
	LossScale   float64
	Skipped     bool
	Seconds     float64
	TokensPerS  float64 // all ranks
	Peak        [graph.NumSpaces][]int64
	Planned     [graph.NumSpaces][]int64
	CommBytes   int64 // all ranks, ring-equivalent
	DiskRead    int64 // all ranks, bytes that copies moved, without what a cache served
	DiskWritten int64
	Cached      bool        // the frozen layers' outputs came from the cache
	Eval        *EvalResult // set where the step was followed by an evaluation
}

// EvalResult is the outcome of an evaluation.
type EvalResult struct {
	Step    int
	Loss    float32
	Targets int64
	Seconds float64
}

// Build plans the run that cfg describes, without allocating any of it. The
// error is a *plan.DoesNotFit where a capacity is too small.
func Build(cfg Config) (*plan.Plan, error) {
	p, _, err := build(&cfg)
	if err != nil {
		return nil, err
	}
	return p, fits(cfg, p, plannedHardware(&cfg))
}

// New plans the run, refuses it if it does not fit, and only then allocates
// memory, starts the ranks and gives parameters their first values (or those of
// Init, or of the checkpoint to resume from).
func New(ctx context.Context, cfg Config) (*Trainer, error) {
	if err := cfg.Runnable(); err != nil {
		return nil, err
	}
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	t := &Trainer{cfg: cfg}
	var err error
	if t.platform, err = newPlatform(&t.cfg); err != nil {
		return nil, err
	}
	if err := t.fit(); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	if err := t.openData(); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	if err := t.openOutputs(); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	if err := t.start(); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	// What planning left on the heap would stay resident beside the arenas, which
	// nothing has touched so far.
	debug.FreeOSMemory()
	if err := t.initialize(ctx); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return t, nil
}

// fit plans the run and refuses what does not fit.
func (t *Trainer) fit() (err error) {
	if t.plan, t.model, err = build(&t.cfg); err != nil {
		return err
	}
	if err := fits(t.cfg, t.plan, t.platform.hardware()); err != nil {
		return t.platform.refused(err)
	}
	return t.platform.preflight(t.plan)
}

// Device describes the device in a line; "" for the CPU.
func (t *Trainer) Device() string { return t.platform.about() }

// Plan returns what the run does.
func (t *Trainer) Plan() *plan.Plan { return t.plan }

// Config returns the configuration with its defaults filled in.
func (t *Trainer) Config() Config { return t.cfg }

// Done returns the number of steps done.
func (t *Trainer) Done() int { return t.step }

func (t *Trainer) start() error {
	cfg, p := &t.cfg, t.plan
	t.pool = pool.New(cfg.threads())
	if err := t.openDisk(); err != nil {
		return err
	}
	if err := t.openPrefixCache(); err != nil {
		return err
	}
	if err := t.platform.start(t); err != nil {
		return err
	}
	if cfg.Trace != "" {
		t.trace = exec.NewTrace(traceSpans)
	}
	var holders []stateRank
	for i := range cfg.Ranks {
		n := cfg.Batch * cfg.Seq
		r := &rank{thread: newThread(), index: i, inputs: make([]int32, n), targets: make([]int32, n)}
		t.ranks = append(t.ranks, r)
		if err := r.do(func() error { return t.openRank(r) }); err != nil {
			return fmt.Errorf("rank %d: %w", i, err)
		}
		holders = append(holders, r)
	}
	t.states = newStates(p.Program, holders)
	return nil
}

// openRank makes a rank's context and executor, on the rank's goroutine.
func (t *Trainer) openRank(r *rank) error {
	ctx, groups, err := t.platform.rank(r.index)
	if err != nil {
		return err
	}
	coord := make([]int, len(t.plan.Program.Mesh))
	for axis := range coord {
		coord[axis] = groups[axis].Rank()
	}
	if t.cfg.wrapDevice != nil {
		ctx = t.cfg.wrapDevice(r.index, ctx)
	}
	r.exec, err = exec.New(exec.Config{Program: t.plan.Program, Layout: t.plan.Layout, Context: ctx, Library: t.platform.library(), Groups: groups,
		Coord: coord, Trace: t.trace, Poison: t.cfg.Poison})
	return err
}

// stopGrace is how long ranks have to notice that the job was aborted. One that
// runs a kernel which never returns does not; it is then left behind.
const stopGrace = 5 * time.Second

// each runs f, which is called what, for all ranks at once and joins their errors: first those that
// are causes, not echoes of another rank's abort. A rank that fails ends the
// others; so does one that is still busy Timeout after the first has ended: the
// collectives' own timeouts don't see a rank that is stuck after the last of them.
func (t *Trainer) each(what string, f func(r *rank) error) error {
	type end struct {
		rank int
		err  error
	}
	ends := make(chan end, len(t.ranks))
	for i, r := range t.ranks {
		r.work <- func() { ends <- end{i, f(r)} }
	}
	abort := func(why error) {
		for _, r := range t.ranks {
			r.exec.Abort(why)
		}
	}
	var first error
	busy := map[int]bool{}
	for i := range t.ranks {
		busy[i] = true
	}
	var late <-chan time.Time
	for len(busy) > 0 {
		select {
		case e := <-ends:
			delete(busy, e.rank)
			switch {
			case e.err == nil && late == nil:
				late = time.After(t.cfg.Timeout)
			case e.err == nil:
			case first == nil:
				first = e.err
				abort(fmt.Errorf("rank %d failed: %w", e.rank, e.err))
				late = time.After(stopGrace)
			case errors.Is(first, comm.ErrAborted) && !errors.Is(e.err, comm.ErrAborted):
				first = e.err
			}
		case <-late:
			if first != nil {
				return fmt.Errorf("%w; %s did not stop within %s", first, t.whereabouts(busy), stopGrace)
			}
			first = fmt.Errorf("%w: %s did not end %s within %s of the first rank that did", comm.ErrTimeout, t.whereabouts(busy), what, t.cfg.Timeout)
			abort(first)
			late = time.After(stopGrace)
		}
	}
	return first
}

// whereabouts names the ranks and what they run.
func (t *Trainer) whereabouts(busy map[int]bool) string {
	var list []string
	for i, r := range t.ranks {
		if busy[i] {
			at := fmt.Sprintf("rank %d", i)
			if ops := r.exec.Running(); len(ops) > 0 {
				at += " (in " + strings.Join(ops, " and ") + ")"
			}
			list = append(list, at)
		}
	}
	return strings.Join(list, ", ")
}

// Step runs one optimizer step on all ranks.
func (t *Trainer) Step(ctx context.Context) (StepResult, error) {
	if t.fatal != nil {
		return StepResult{}, t.fatal
	}
	if err := ctx.Err(); err != nil {
		return StepResult{}, err
	}
	began := time.Now()
	s := t.step
	lr := t.cfg.LearningRate(s)
	targets, err := t.train.countTargets(s, t.cfg.Accum, t.cfg.Ranks)
	if err != nil {
		return StepResult{}, t.fail(s, err)
	}
	if targets == 0 {
		return StepResult{}, t.fail(s, errors.New("no target in the global batch counts: all are -1"))
	}
	hyper := t.hyper(s, lr, targets)
	sent, moved := t.commBytes(), t.diskTraffic()
	at := stepAt{index: s, hyper: hyper}
	at.section, at.cached = t.stepForm(s)
	err = t.runStep(&at)
	if err != nil {
		t.fatal = err // names the rank and the step already
		return StepResult{}, err
	}
	loss, err := t.hostF64(t.plan.Program.HostLoss)
	if err != nil {
		return StepResult{}, t.fail(s, err)
	}
	norm := 0.0
	if t.updates() {
		if norm, err = t.gradNorm(&at); err != nil {
			return StepResult{}, t.fail(s, err)
		}
	}
	skipped := false
	if !isFinite(loss) || !isFinite(norm) {
		if skipped, err = t.nonFinite(&at, loss/float64(targets), norm); err != nil {
			t.fatal = err
			return StepResult{}, err
		}
	}
	if !skipped {
		t.skipped.inRow = 0
	}
	t.step++
	t.pending = t.plan.Program.Section("flush") != nil
	res := StepResult{Step: t.step, Loss: float32(loss / float64(targets)), LR: lr, GradNorm: norm, LossScale: 1, Skipped: skipped, CommBytes: t.commBytes() - sent}
	traffic := t.diskTraffic()
	res.DiskRead, res.DiskWritten = traffic.Read-moved.Read, traffic.Written-moved.Written
	res.Cached = at.cached
	res.Seconds = time.Since(began).Seconds()
	res.TokensPerS = float64(t.cfg.Ranks*t.cfg.Accum*t.cfg.Batch*t.cfg.Seq) / res.Seconds
	for sp := range graph.NumSpaces {
		for _, r := range t.ranks {
			res.Peak[sp] = append(res.Peak[sp], r.exec.Touched(sp))
			res.Planned[sp] = append(res.Planned[sp], t.plan.Layout.Spaces[sp].Peak)
		}
	}
	return res, nil
}

// stepAt is a step on its way through the ranks.
type stepAt struct {
	index   int    // steps done before it
	section string // the form of the step that runs
	cached  bool   // what frozen layers hand on comes from the cache
	stopped bool   // it is not finite, and ended before its update
	noNorm  bool   // it ended before its gradient norm was known
	hyper   [graph.NumHyper]float64
}

// runStep runs a step on all ranks.
func (t *Trainer) runStep(at *stepAt) error {
	ran := make([]bool, len(t.ranks))
	err := t.each(fmt.Sprintf("step %d", at.index+1), func(r *rank) error {
		r.exec.SetStep(int64(at.index + 1))
		micro := 0
		var err error
		if t.stopsNonFinite() {
			ran[r.index], err = r.exec.RunGated(at.section, t.inputsOf(r, at, &micro), func(norm bool) (bool, error) { return t.gate(r, norm) })
		} else {
			ran[r.index], err = true, r.exec.RunSection(at.section, t.inputsOf(r, at, &micro))
		}
		if err != nil || at.cached || !ran[r.index] {
			return err
		}
		return t.keepPrefix(r, at.index, micro-1)
	})
	at.stopped = slices.Contains(ran, false)
	return err
}

// inputsOf returns what gives a rank the inputs of each micro-step, which it counts.
func (t *Trainer) inputsOf(r *rank, at *stepAt, micro *int) func(*graph.Phase, int) error {
	return func(ph *graph.Phase, _ int) error {
		if ph.Name == "update" {
			return nil
		}
		defer func() { *micro++ }()
		var err error
		switch {
		case at.cached:
			err = t.givePrefix(r, at.index, *micro)
		case *micro > 0: // of the last one: after the section
			err = t.keepPrefix(r, at.index, *micro-1)
		}
		if err != nil {
			return err
		}
		return t.fill(r, t.train, at.hyper, at.index, *micro)
	}
}

func (t *Trainer) fail(step int, err error) error {
	t.fatal = fmt.Errorf("step %d: %w", step+1, err)
	return t.fatal
}

// hyper returns the values of the Hyper buffer for a step.
func (t *Trainer) hyper(step int, lr float64, targets int64) [graph.NumHyper]float64 {
	var h [graph.NumHyper]float64
	h[graph.HyperLR] = lr
	h[graph.HyperInvCount] = 1 / float64(targets)
	h[graph.HyperLossScale] = 1
	updates := float64(step + 1 - t.skipped.all) // a skipped step moves no moment
	h[graph.HyperBC1] = 1 - math.Pow(t.cfg.Beta1, updates)
	h[graph.HyperBC2] = 1 - math.Pow(t.cfg.Beta2, updates)
	return h
}

// fill gives a rank the inputs of one micro-step.
func (t *Trainer) fill(r *rank, b *batches, hyper [graph.NumHyper]float64, step, micro int) error {
	p := t.plan.Program
	if err := b.fill(step, micro, r.index, r.inputs, r.targets); err != nil {
		return err
	}
	var key [graph.NumKey]int64
	key[graph.KeySeed] = t.cfg.Seed
	key[graph.KeyStep] = int64(step)
	key[graph.KeySample] = ((int64(step)*int64(t.cfg.Accum)+int64(micro))*int64(t.cfg.Ranks) + int64(r.index)) * int64(t.cfg.Batch)
	return errors.Join(
		fillHost(r.exec.HostI32, p.HostTokens, r.inputs), fillHost(r.exec.HostI32, p.HostTargets, r.targets),
		fillHost(r.exec.HostF64, p.HostHyper, hyper[:]), fillHost(r.exec.HostI64, p.HostKey, key[:]))
}

// fillHost copies v to the start of a host buffer, where the program has it.
func fillHost[T any](host func(graph.BufID) ([]T, error), buf graph.BufID, v []T) error {
	if buf == graph.NoBuf {
		return nil
	}
	dst, err := host(buf)
	if err != nil {
		return err
	}
	copy(dst, v)
	return nil
}

func (t *Trainer) hostF64(buf graph.BufID) (float64, error) {
	v, err := t.ranks[0].exec.HostF64(buf)
	if err != nil {
		return 0, err
	}
	return v[0], nil
}

func (t *Trainer) commBytes() (n int64) {
	for _, r := range t.ranks {
		n += r.exec.CommStats().Sent
	}
	return n
}

// Evaluate returns the mean loss over EvalSteps batches of the held-out data.
func (t *Trainer) Evaluate(ctx context.Context) (EvalResult, error) {
	if t.eval == nil {
		return EvalResult{}, errors.New("evaluate: the run has no --eval-data")
	}
	if t.fatal != nil {
		return EvalResult{}, t.fatal
	}
	began := time.Now()
	if err := t.flush(); err != nil {
		return EvalResult{}, err
	}
	var sum float64
	var count int64
	for k := range t.cfg.EvalSteps {
		if err := ctx.Err(); err != nil {
			return EvalResult{}, err
		}
		n, err := t.eval.countTargets(k, 1, t.cfg.Ranks)
		if err != nil {
			return EvalResult{}, err
		}
		err = t.each("the evaluation", func(r *rank) error {
			return r.exec.RunSection("eval", func(*graph.Phase, int) error {
				return t.fill(r, t.eval, t.hyper(t.step, 0, max(n, 1)), k, 0)
			})
		})
		if err != nil {
			t.fatal = fmt.Errorf("evaluation: %w", err)
			return EvalResult{}, t.fatal
		}
		loss, err := t.hostF64(t.plan.Program.HostLoss)
		if err != nil {
			return EvalResult{}, err
		}
		sum += loss
		count += n
	}
	return EvalResult{Step: t.step, Loss: float32(sum / float64(count)), Targets: count, Seconds: time.Since(began).Seconds()}, nil
}

// Run trains until Steps are done, evaluating and saving as configured, and
// tells each step. A canceled context saves a checkpoint where one is
// configured and returns the context's error.
func (t *Trainer) Run(ctx context.Context, tell func(StepResult) error) error {
	for t.step < t.cfg.Steps {
		res, err := t.Step(ctx)
		if err != nil {
			if t.fatal == nil && t.cfg.Checkpoint != "" { // interrupted between steps
				_, saveErr := t.Save()
				err = errors.Join(err, saveErr)
			}
			return err
		}
		last := t.step == t.cfg.Steps
		if t.eval != nil && (last || t.cfg.EvalEvery > 0 && t.step%t.cfg.EvalEvery == 0) {
			ev, err := t.Evaluate(ctx)
			switch {
			case err == nil:
				res.Eval = &ev
			case ctx.Err() == nil:
				return err
			}
		}
		if tell != nil {
			if err := tell(res); err != nil {
				return err
			}
		}
		if t.cfg.Checkpoint != "" && (last || t.cfg.SaveEvery > 0 && t.step%t.cfg.SaveEvery == 0) {
			if _, err := t.Save(); err != nil {
				return err
			}
		}
	}
	return nil
}

// ParamsSHA256 returns the SHA-256 over all parameters in the byte order of
// their Hugging Face names, fp32 little-endian, in Hugging Face's shapes.
func (t *Trainer) ParamsSHA256() (string, error) {
	if err := t.flush(); err != nil {
		return "", err
	}
	h := sha256.New()
	if err := t.states.hash(h); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// Parameter returns a copy of one parameter, by its Hugging Face name.
func (t *Trainer) Parameter(name string) (shape []int64, values []float32, err error) {
	for i := range t.plan.Program.Params {
		prm := &t.plan.Program.Params[i]
		if prm.Name == name {
			if err := t.flush(); err != nil {
				return nil, nil, err
			}
			values = make([]float32, prm.Elems())
			return append([]int64(nil), prm.Shape...), values, t.states.read(i, "value", 0, values)
		}
	}
	return nil, nil, fmt.Errorf("the model has no parameter %q", name)
}

// Close ends the ranks, gives their memory back and writes the trace.
func (t *Trainer) Close() error {
	var errs []error
	for _, r := range t.ranks {
		errs = append(errs, r.close())
	}
	t.ranks = nil
	if t.platform != nil {
		errs = append(errs, t.platform.close())
		t.platform = nil
	}
	if t.prefix != nil {
		errs = append(errs, t.prefix.close())
		t.prefix = nil
	}
	errs = append(errs, t.closeDisk())
	if t.pool != nil {
		t.pool.Close()
		t.pool = nil
	}
	if t.trace != nil {
		if err := t.trace.Write(t.traceFile); err != nil {
			errs = append(errs, fmt.Errorf("--trace: %w", err))
		}
		t.trace = nil
	}
	if t.traceFile != nil {
		errs = append(errs, t.traceFile.Close())
		t.traceFile = nil
	}
	for _, b := range []*batches{t.train, t.eval} {
		if b != nil {
			errs = append(errs, b.close())
		}
	}
	t.train, t.eval = nil, nil
	return errors.Join(errs...)
}

// modelConfig reads the model's shape: from the folder name, if it holds a
// config.json, or else from the preset of that name.
func modelConfig(name string) (hfconfig.Config, error) {
	st, err := os.Stat(name)
	isFolder := err == nil && st.IsDir()
	if _, err := os.Stat(filepath.Join(name, hfconfig.FileName)); isFolder && (err == nil || strings.ContainsAny(name, `/\`)) {
		c, err := hfconfig.Read(name)
		if err != nil {
			return c, fmt.Errorf("--model %s: %w", name, err)
		}
		return c, nil
	}
	if strings.ContainsAny(name, `/\`) {
		return hfconfig.Config{}, fmt.Errorf("--model %s: no such folder", name)
	}
	return presetConfig(name)
}
