// Package train is the machine of a training run: what a Config asks for is resolved
// and planned, and a Trainer runs it over the ranks of a process or of several.
// Programs use it through package spillway, at the top of the module.
package train

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/data/token"
	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/platform"
	"github.com/spillway-ml/spillway/receipt"
	"github.com/spillway-ml/spillway/run"
	"github.com/spillway-ml/spillway/train/job"
	"github.com/spillway-ml/spillway/train/receipts"
	"github.com/spillway-ml/spillway/train/saving"
)

// Trainer runs a training job over the ranks of this process. Its methods are
// for one goroutine.
type Trainer struct {
	cfg   *resolved // nil before the plan stands
	job   *job.Job  // nil: this process alone
	plan  *plan.Plan
	ports [graph.NumPorts]graph.BufID // of the plan's program
	// inputs are the ports that the host fills before a phase of the step runs, an entry for each
	// micro-batch that the phase computes: one, or in layer order all of the step.
	inputs [][graph.NumPorts]graph.BufID
	floats [][]graph.BufID // beside them, the float inputs

	platform platform.Platform
	pool     *pool.Pool
	ranks    *run.Ranks
	micro    []*data.Micro       // by slot of the rank in this process: the micro-batch at hand, but for its floats
	read     []time.Duration     // likewise: how long it read samples in this step
	flops    map[stepKey]float64 // of the ranks' products
	states   *run.States
	disk     *store.Folder // nil: none
	saver    *saving.Saver // open for this run; nil: no checkpoints
	prefix   *prefixCache  // of frozen layers' outputs; nil: none
	trace    *exec.Trace
	receipt  *receipts.Lines // nil: none
	follows  bool            // the receipt is the one that a checkpoint names

	tokenizer token.Tokenizer // nil: the run reads no text
	decoder   *decoder        // of Decode; nil: not used so far
	notes     []string        // what a person should know before the first step
	train     *batches
	eval      *batches

	at         saving.Progress
	inRow      int   // the newest steps, one after the other, whose update was left out
	fatal      error // after a failed step nothing else runs
	accepted   bool  // New has made it: outputs may be touched
	savedRanks int   // of the run that wrote the checkpoint this one goes on from
}

// flush runs the update that the next step's section would begin with, where the
// plan has it so, beside that step's forward: somebody wants the states before.
func (t *Trainer) flush() error {
	if t.fatal != nil {
		return t.fatal
	}
	if !t.at.Pending {
		return nil
	}
	err := t.ranks.Each(fmt.Sprintf("the update of step %d", t.at.Step), func(r *run.Rank) error {
		r.Exec.SetStep(int64(t.at.Step), 0)
		return r.Exec.RunSection(graph.SectionFlush.String(), nil)
	})
	if err != nil {
		t.fatal = err
		return err
	}
	t.at.Pending = false
	return nil
}

// StepResult is what a step tells.
type StepResult struct {
	Step       int     // from 1
	Rows       int     // of the global batch
	Loss       float32 // mean over the counted targets of the global batch
	Accuracy   float64 // share of the counted targets that got the largest logit; NaN unless they are classes, and on GPUs
	LR         float64 // learning rate of the step
	GradNorm   float64 // Euclidean norm of all gradients, before clipping
	Noise      Noise
	LossScale  float64 // by which the loss was multiplied; 1 outside fp16
	Skipped    bool    // the step's update was left out
	SkippedAll int     // steps of the run so far whose update was left out
	Targets    int64   // counted targets of the global batch
	Seconds    float64 // of the step, by the clock on the wall
	TokensPerS float64 // tokens a second, all ranks
	// Peak and Planned are, by space and rank, the bytes below the highest byte that an
	// operation has touched so far, and those of the plan.
	Peak, Planned [graph.NumSpaces][]int64
	// Classes has, by rank, what of each space's peak has been touched, by class: the
	// bytes of the buffers that the plan has alive there. They sum to Peak, and are the
	// plan's ByClass once all has run that the peak is made of.
	Classes     [][graph.NumSpaces][graph.NumClasses]int64
	CommBytes   int64 // all ranks, ring-equivalent
	DiskRead    int64 // all ranks, bytes that copies moved, without what a cache served
	DiskWritten int64
	Cached      bool // the frozen layers' outputs came from the cache
	// Comm is what each kind of collective took, of all ranks, and Overlap the share of
	// their time during which the rank computed: with Config.Measure, else nil and NaN.
	Comm    []CommUse
	Overlap float64
	// DataWait is how long a rank of this process, the slowest, read samples, in s, and
	// FlopsShare what the multiply-adds of its ranks' products, 2 each, are of
	// Config.PeakFlops: forward and backward, without what is computed again. NaN: it is not
	// known.
	DataWait   float64
	FlopsShare float64
	Eval       *EvalResult // set where the step was followed by an evaluation
}

// CommUse is what a kind of collective took in a step, summed over ranks.
type CommUse struct {
	Op      string
	Calls   int64
	Bytes   int64   // of the whole buffers: all shards of a gather or scatter
	Seconds float64 // waiting for peers among it
}

// New plans the run, refuses it if it does not fit, and only then allocates
// memory, starts the ranks and gives parameters their first values (or those of
// Init, or of the checkpoint to resume from).
func New(ctx context.Context, cfg config.Config) (*Trainer, error) {
	return request{Config: cfg}.start(ctx)
}

// NewIn is New with the checkpoints in other folders than the system's. It is for tests.
func NewIn(ctx context.Context, cfg config.Config, folders filesys.Opener) (*Trainer, error) {
	return request{Config: cfg, hooks: hooks{folders: folders}}.start(ctx)
}

// NewFrom is New of a run whose Config.Model and Config.Init are an open model.
func NewFrom(ctx context.Context, cfg config.Config, m *planner.Model) (*Trainer, error) {
	cfg.Model, cfg.Init = m.Path, m.Path
	return request{Config: cfg, hooks: hooks{opened: m}}.start(ctx)
}

func (q request) start(ctx context.Context) (*Trainer, error) {
	if err := cmp.Or(ctx.Err(), level.Err(), q.Runnable(), planner.Runnable(&q.Config), q.Validate()); err != nil {
		return nil, err
	}
	if q.Checkpoint == "" && strings.EqualFold(q.AsyncSave, config.AsyncOn) { // a plan may ask what it takes
		return nil, config.Refuse("Config.AsyncSave on needs Config.Checkpoint: the folder to save to")
	}
	path, note, err := receipts.Follow(&q.Config, q.opener())
	follows := path != q.Receipt
	q.Receipt = path
	if err := cmp.Or(err, refuseOverwriting(&q), saving.Look(&q.Config, q.opener())); err != nil {
		return nil, err
	}
	t := &Trainer{job: job.Of(&q.Config), follows: follows}
	if note != "" {
		t.notes = append(t.notes, note)
	}
	if t.platform, q.Config, err = newPlatform(q); err != nil {
		return nil, err
	}
	if t.job != nil { // a process that does not answer is waited for no longer
		stay := context.AfterFunc(ctx, func() { t.job.Broken(ctx.Err()) })
		defer stay()
	}
	if q.Config, err = job.Greet(q.Config); err != nil {
		return nil, t.refused(err)
	}
	fit := func(ctx context.Context) error { return t.fit(ctx, q) }
	for _, begin := range []func(context.Context) error{fit, t.openData, t.openOutputs, t.openAll, t.initialize, t.openReceipt} {
		err := ctx.Err()
		if err == nil {
			err = begin(ctx)
		}
		if err != nil {
			return nil, t.refused(err)
		}
	}
	t.accepted = true
	return t, nil
}

// refused ends a run that has not begun because of err. Processes that were given nothing to
// run are told so: a stream that ends without a word is a leader that was lost, whose status
// would hide what the leader's says.
func (t *Trainer) refused(err error) error {
	if t.job != nil {
		t.job.Dismiss(err)
	}
	return errors.Join(err, t.Close())
}

// fit resolves and plans the run and refuses what does not fit. Some devices say only once they
// have a plan what they take beside the arenas: if the plan has no room for that, fit plans again.
func (t *Trainer) fit(ctx context.Context, q request) error {
	for {
		if err := t.fitOnce(ctx, q); err != nil {
			return err
		}
		if err := t.platform.Measure(t.plan); err != nil {
			return err
		}
		before, after := q.Outside[graph.Device], t.platform.Limits().Outside[graph.Device]
		limit, use := t.plan.Config.Capacity[graph.Device], t.plan.Layout.Spaces[graph.Device].Peak+t.plan.Config.Outside[graph.Device]
		if after <= before || limit == 0 || use+after-before <= limit {
			t.cfg = t.cfg.beside(after)
			t.plan.Config.Outside[graph.Device] += after - before
			break
		}
		q.Outside = t.platform.Limits().Outside // more is outside than the plan left: each round leaves more
	}
	if !q.Inference {
		t.notes = append(t.notes, t.adapterNotes()...)
		t.notes = append(t.notes, t.cfg.IdleNotes()...)
		t.notes = append(t.notes, fileNotes(&t.cfg.Config)...)
		t.notes = append(t.notes, planner.DropoutNote(t.cfg.Shape.Dropouts, &t.cfg.Config)...)
		t.notes = append(t.notes, config.RingNote(&t.cfg.Config)...)
		t.notes = append(t.notes, t.cfg.RateNote()...)
	}
	if t.cfg.Planned != nil {
		t.cfg.Planned(t.plan)
	}
	return nil
}

// fitOnce is fit with what is known of the device.
func (t *Trainer) fitOnce(ctx context.Context, q request) (err error) {
	if t.plan, t.cfg, err = q.build(ctx); err != nil {
		return err
	}
	t.ports = t.plan.Program.Ports()
	t.inputs, t.floats = nil, nil
	for k := range microsOfPhase(t.plan.Program) {
		t.inputs = append(t.inputs, t.plan.Program.PortsOf(k))
		t.floats = append(t.floats, t.plan.Program.InputsOf(k))
	}
	if err := t.cfg.Fits(ctx, t.plan, hardwareOf(t.platform, &t.cfg.Config)); err != nil {
		if d := t.job.Disk(); d != nil && t.plan.Layout.Spaces[graph.Disk].Peak > d.Share() {
			err = fmt.Errorf("%w; free in Config.Disk %s are %s", err, t.cfg.Disk, d)
		}
		return t.platform.Refused(err)
	}
	return onThisMachine(&t.cfg.Config, t.plan, t.platform.InMachine())
}

// RecomputeAuto says what recompute auto came to; "" where it was not asked for.
func (t *Trainer) RecomputeAuto() string { return planner.AutoText(t.cfg.Chosen) }

// Plan returns what the run does.
func (t *Trainer) Plan() *plan.Plan { return t.plan }

// Config returns the configuration with its defaults filled in.
func (t *Trainer) Config() config.Config { return t.cfg.Config }

// ByteTokens says that the run's tokenizer takes each byte of text for a token.
func (t *Trainer) ByteTokens() bool { return t.tokenizer != nil && t.tokenizer.Name() == "bytes" }

// Notes are lines about the run that a person should see before its first step.
func (t *Trainer) Notes() []string { return t.notes }

// Skipped returns how many of the steps done had no update, because they were not
// finite.
func (t *Trainer) Skipped() int { return t.at.Skipped }

// SavedRanks returns the number of ranks of the run that saved what this one goes on
// from, 0 where it began by itself or the checkpoint does not say.
func (t *Trainer) SavedRanks() int { return t.savedRanks }

// Done returns the number of steps done.
func (t *Trainer) Done() int { return t.at.Step }

// openAll opens what the run stands on: the other processes, threads, the disk tier, the
// ranks.
func (t *Trainer) openAll(ctx context.Context) error {
	cfg := t.cfg
	if err := t.lead(); err != nil {
		return err
	}
	t.pool = pool.New(cfg.ComputeThreads())
	if err := t.openDisk(); err != nil {
		return err
	}
	if err := t.openPrefixCache(); err != nil {
		return err
	}
	if err := t.platform.Start(t.setup()); err != nil {
		return err
	}
	if err := t.openRanks(); err != nil {
		return err
	}
	shape := planner.SampleShape(t.plan.Program, cfg.Batch)
	shape.Inputs = nil // they are written to their ports
	for range t.ranks.Len() {
		t.micro = append(t.micro, shape.NewMicro(cfg.Batch))
		t.read = append(t.read, 0)
	}
	t.states = t.ranks.States()
	if t.saver == nil {
		return nil
	}
	if t.plan.Layout.Spaces[graph.Disk].Peak > 0 {
		if err := t.saver.CheckRoom(ctx); err != nil {
			return err
		}
	}
	return t.saver.Over(t.ranks, t.states)
}

// Step runs one optimizer step on all ranks. Where ctx is canceled, a step of several
// micro-batches is abandoned between two of them, as if it had not begun; in layer
// order, where all end together, it is finished.
func (t *Trainer) Step(ctx context.Context) (StepResult, error) {
	if t.fatal != nil {
		return StepResult{}, t.fatal
	}
	if err := ctx.Err(); err != nil {
		return StepResult{}, err
	}
	if t.train == nil {
		return StepResult{}, errors.New("step: the run was configured for inference alone")
	}
	began := time.Now()
	s := t.at.Step
	lr := t.cfg.LearningRate(s)
	if !isFinite(lr) || lr < 0 {
		return StepResult{}, t.fail(s, fmt.Errorf("Config.Own.Schedule: the learning rate is %g, want a finite number of at least 0", lr))
	}
	counted, err := t.train.countTargets(s)
	if err != nil {
		return StepResult{}, t.fail(s, err)
	}
	targets := counted.All
	if targets == 0 {
		return StepResult{}, t.fail(s, errors.New("no target in the global batch counts: all are -1"))
	}
	hyper := t.hyper(s, lr, targets)
	sent, moved, used := t.ranks.CommSent(), t.diskTraffic(), t.ranks.Usage()
	at := stepAt{index: s, hyper: hyper, leaving: leaving{asked: ctx.Err}}
	if err := t.form(&at); err != nil {
		return StepResult{}, t.fail(s, err)
	}
	clear(t.read)
	t.receipt.Begin(t.train.sampler, s)
	if err = t.runStep(&at); err != nil {
		t.fatal = err // names the rank and the step already
		return StepResult{}, err
	}
	if at.left {
		return StepResult{}, at.leaving.why
	}
	t.at.Pending = false // the section began with the update of the step before
	loss, right, err := t.hostLoss()
	if err != nil {
		return StepResult{}, t.fail(s, err)
	}
	norm := 0.0
	if t.updates() {
		if norm, err = t.gradNorm(&at); err != nil {
			return StepResult{}, t.fail(s, err)
		}
	}
	if err := t.readScale(); err != nil {
		return StepResult{}, t.fail(s, err)
	}
	skipped := false
	if !isFinite(loss) || !isFinite(norm) {
		if skipped, err = t.nonFinite(&at, loss/float64(targets), norm); err != nil {
			return StepResult{}, err
		}
	}
	if !skipped {
		t.inRow = 0
	}
	t.at.Step++
	t.at.Pending = t.plan.Program.SectionOf(graph.SectionFlush, graph.FormWhole) != nil
	of := t.cfg.At(s)
	res := StepResult{Step: t.at.Step, Rows: of.StepRows(), Loss: float32(loss / float64(targets)), Accuracy: right / float64(targets), LR: lr, Targets: targets, GradNorm: norm, LossScale: hyper[graph.HyperLossScale], Skipped: skipped, SkippedAll: t.at.Skipped, CommBytes: t.ranks.CommSent() - sent}
	traffic := t.diskTraffic()
	res.DiskRead, res.DiskWritten = traffic.Read-moved.Read, traffic.Written-moved.Written
	res.Cached = at.cached
	res.tellComm(t.cfg.Measure, t.ranks.Usage().Sub(used))
	res.DataWait = slices.Max(t.read).Seconds()
	if res.Noise, err = t.noise(res.Rows, counted, norm, hyper[graph.HyperLossScale]); err != nil {
		return StepResult{}, t.fail(s, err)
	}
	if !skipped {
		t.confirm()
	}
	res.Seconds = time.Since(began).Seconds()
	res.FlopsShare = math.NaN()
	if peak := t.cfg.PeakFlops; peak > 0 {
		res.FlopsShare = t.modelFlops(&at) / res.Seconds / peak
	}
	res.TokensPerS = float64(res.Rows*t.cfg.Seq) / res.Seconds
	res.Peak, res.Planned = t.ranks.Memory()
	res.Classes = t.ranks.Classes()
	t.receipt.Ended(receipt.Step{Targets: targets, LR: res.LR, Loss: receipt.Bits32(res.Loss), GradNorm: receipt.Bits64(res.GradNorm), Skipped: res.Skipped})
	return res, nil
}

func (t *Trainer) fail(step int, err error) error {
	t.fatal = fmt.Errorf("step %d: %w", step+1, err)
	return t.fatal
}

func (t *Trainer) hostF64(buf graph.BufID) (float64, error) {
	v, err := t.ranks.First().Exec.HostF64(buf)
	if err != nil {
		return 0, err
	}
	return v[0], nil
}

// ParamsSHA256 returns the SHA-256 over all parameters in the byte order of
// their Hugging Face names, fp32 little-endian, in Hugging Face's shapes.
func (t *Trainer) ParamsSHA256() (string, error) {
	if err := t.flush(); err != nil {
		return "", err
	}
	h := sha256.New()
	if err := t.states.Hash(h); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// errClosed is of calls after Close.
var errClosed = errors.New("the Trainer is closed")

// Close ends the ranks, gives their memory back and writes the trace. Calls of what needs
// them are errors from then on.
func (t *Trainer) Close() error {
	defer func() { t.fatal = cmp.Or(t.fatal, errClosed) }()
	var errs []error
	t.settled() // it reads what the ranks' processes hold
	if t.ranks != nil {
		if t.fatal == nil {
			t.writeTrace(t.ranks.Traces())
		}
		errs = append(errs, t.ranks.Close())
		t.ranks = nil
	}
	if t.job != nil {
		errs = append(errs, t.job.HangUp())
	}
	if t.platform != nil {
		errs = append(errs, t.platform.Close())
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
	t.writeTrace(nil)
	for _, b := range []*batches{t.train, t.eval} {
		if b != nil {
			errs = append(errs, b.close())
		}
	}
	t.train, t.eval = nil, nil
	if t.saver != nil {
		t.saver.Close()
		t.saver = nil
	}
	errs = append(errs, t.receipt.Close())
	return errors.Join(errs...)
}

// writeTrace writes the trace of a run that began, unless that is done: with the events
// of other processes' ranks, which a job that has failed does not give any more.
func (t *Trainer) writeTrace(others []exec.Events) {
	trace := t.trace
	if trace == nil {
		return
	}
	t.trace = nil
	if !t.accepted {
		return
	}
	if t.job != nil && others == nil {
		t.cfg.Warnf("Config.Trace shows %s alone: the job has failed, and the other ranks' processes keep theirs", platform.Names(job.World(&t.cfg.Config).Local))
	}
	if err := writeAside(t.cfg.Trace, func(w io.Writer) error { return trace.Write(w, others...) }); err != nil {
		t.cfg.Warnf("Config.Trace: %v", err)
	}
}

// Device describes the device in a line; "" for the CPU.
func (t *Trainer) Device() string {
	about := t.platform.About()
	if t.platform.GPU() == nil || about == "" {
		return about
	}
	if why := t.cfg.WithoutGraphs(); why != "" {
		return about + "; no CUDA graphs: " + why
	}
	return about + "; CUDA graphs from the second step on"
}
