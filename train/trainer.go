// Package train runs training: it resolves and plans a Config, and a Trainer runs the plan over the
// ranks of one process or several. Programs use it through package spillway, at the top of the
// module.
package train

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"sync"
	"time"

	"github.com/dgraph-io/ristretto/v2"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/data/token"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/platform"
	"github.com/spillway-ml/spillway/run"
	"github.com/spillway-ml/spillway/train/job"
	"github.com/spillway-ml/spillway/train/receipts"
	"github.com/spillway-ml/spillway/train/saving"
)

// Trainer runs a training job over the ranks of this process. Its methods are
// for one goroutine.
type Trainer struct {
	cfg   *resolved // nil until there is a plan
	job   *job.Job  // nil: this process alone
	plan  *plan.Plan
	ports [graph.NumPorts]graph.BufID // of the plan's program
	// inputs are the ports that the host fills before a phase of the step runs. They have an entry
	// for each micro-batch that the phase computes: one, or in layer order all of the step.
	inputs [][graph.NumPorts]graph.BufID
	floats [][]graph.BufID // the float inputs, likewise

	platform platform.Platform
	pool     *pool.Pool
	ranks    *run.Ranks
	micro    []*data.Micro       // by slot of the rank in this process: the current micro-batch, without its floats
	read     []time.Duration     // likewise: how long it read samples in this step
	flops    map[stepKey]float64 // of the ranks' products
	states   *run.States
	disk     *store.Folder // nil: none
	saver    *saving.Saver // open for this run; nil: no checkpoints
	prefix   *prefixCache  // of frozen layers' outputs; nil: none
	trace    *exec.Trace
	receipt  *receipts.Lines // nil: none
	follows  bool            // a checkpoint names this receipt

	tokenizer token.Tokenizer // nil: the run reads no text
	decoder   *decoder        // of Decode; nil: not used yet
	notes     []string        // notes for the user before the first step
	train     *batches
	eval      *batches

	at         saving.Progress
	inRow      int   // number of newest steps in a row whose update was left out
	fatal      error // after a failed step nothing else runs
	accepted   bool  // set once New has succeeded; output files may be written from now on
	savedRanks int   // ranks of the run that wrote the checkpoint from which this run resumed
}

// flush runs the pending update if the plan overlaps it with the next step's forward. It is for
// callers that need the states before that step.
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

// StepResult describes a finished step.
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
	Seconds    float64 // of the step, wall time
	TokensPerS float64 // tokens a second, all ranks
	// Peak and Planned are bytes by space and rank: up to the highest byte that an operation has
	// touched so far, and of the plan.
	Peak, Planned [graph.NumSpaces][]int64
	// Classes has, by rank and class, the bytes touched so far of the buffers that the plan has
	// live at each space's peak. They sum to Peak. Once all operations of the peak have run, they
	// equal the plan's ByClass.
	Classes     [][graph.NumSpaces][graph.NumClasses]int64
	CommBytes   int64 // all ranks, ring-equivalent
	DiskRead    int64 // all ranks, bytes that copies moved, without what a cache served
	DiskWritten int64
	Cached      bool // the frozen layers' outputs came from the cache
	// Comm has the use of each kind of collective, summed over ranks. Overlap is the share of the
	// collectives' time during which the rank computed. Without Config.Measure they are nil and
	// NaN.
	Comm    []CommUse
	Overlap float64
	// DataWait is the longest time, in seconds, that a rank of this process read samples.
	// FlopsShare is the FLOPs of its ranks' products per second over Config.PeakFlops, 2 FLOPs for
	// each multiply-add. It counts forward and backward, without recomputation; NaN: unknown.
	DataWait   float64
	FlopsShare float64
	Eval       *EvalResult // nil unless an evaluation followed the step
	// EvalOnly says that an evaluation that was canceled earlier is now done. Only Step and Eval
	// are set; the step itself was reported before.
	EvalOnly bool
}

// CommUse is the use of one kind of collective in a step, summed over ranks.
type CommUse struct {
	Op      string
	Calls   int64
	Bytes   int64   // of the complete buffers: all shards of a gather or scatter
	Seconds float64 // including waiting for other ranks
}

// RecomputeAuto describes the recomputation that Config.Recompute auto chose; "" without auto.
func (t *Trainer) RecomputeAuto() string { return planner.AutoText(t.cfg.Chosen) }

// Plan returns the run's plan.
func (t *Trainer) Plan() *plan.Plan { return t.plan }

// Config returns the configuration with its defaults filled in.
func (t *Trainer) Config() config.Config { return t.cfg.Config }

// ByteTokens says whether the run's tokenizer makes each byte of text a token.
func (t *Trainer) ByteTokens() bool { return t.tokenizer != nil && t.tokenizer.Name() == "bytes" }

// Notes returns lines about the run for the user, to be shown before the first step.
func (t *Trainer) Notes() []string { return t.notes }

// Skipped returns the number of steps so far whose update was left out because they were not
// finite.
func (t *Trainer) Skipped() int { return t.at.Skipped }

// SavedRanks returns the number of ranks of the run that wrote the checkpoint from which this run
// resumed. It is 0 if the run did not resume or the checkpoint does not record it.
func (t *Trainer) SavedRanks() int { return t.savedRanks }

// Done returns the number of steps done.
func (t *Trainer) Done() int { return t.at.Step }

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

// Device returns a one-line description of the device; "" for the CPU, and after Close.
func (t *Trainer) Device() string {
	if t.platform == nil {
		return ""
	}
	about := t.platform.About()
	if t.platform.GPU() == nil || about == "" {
		return about
	}
	if why := t.cfg.WithoutGraphs(); why != "" {
		return about + "; no CUDA graphs: " + why
	}
	return about + "; CUDA graphs from the second step on"
}

// confirm lets the saver check whether the newest checkpoint is now confirmed.
func (t *Trainer) confirm() {
	if t.saver != nil {
		t.saver.Confirm()
	}
}

// EvalResult is the outcome of an evaluation.
type EvalResult struct {
	Step int     // steps done before it
	Loss float32 // mean over the counted targets
	// Accuracy is the share of the counted targets that got the largest logit. It is NaN
	// where targets are not classes (one a row, by CrossEntropy), and on GPUs.
	Accuracy float64
	Targets  int64   // that were counted
	Seconds  float64 // wall time
}

// Noise is the gradient noise scale (McCandlish et al., An Empirical Model of Large-Batch
// Training, 2018, arXiv:1812.06162): tr(Σ)/|G|², in rows. Σ is the covariance of one row's
// gradient and G its mean. It is known on the CPU for steps of at least two micro-batches with
// Reproducible; other values are NaN.
type Noise struct {
	// Scale is estimated from the means of the newest steps, at most noiseSteps, and Error is
	// its standard error, from how these steps differ. Scale is NaN if the mean of |G|² is not
	// above 0.
	Scale, Error float64
	// Square and Trace are the unbiased estimates of |G|² and tr(Σ) from this step alone.
	Square, Trace float64
}

// batches is an opened data set and the order in which a run reads it.
type batches struct {
	sampler  *data.Sampler
	source   data.Source
	buffer   *data.Buffer       // nil for the program's own data
	samples  *data.SampleReader // the program's own data, or conversations; otherwise nil
	chat     *data.Conversations
	template string
	all      bool // every target of a sample counts; otherwise they must be counted
	steps    int  // batches of an evaluation: EvalSteps, or fewer that hold each row once
	scratch  [2][]int32
}

// decoder runs the program's generation phases over rows of tokens. If the plan caches keys and
// values, only tokens that are not yet cached in the row's slot are computed. A row longer than
// Config.Seq is cut to its last Seq tokens, whose positions move with every token. Without a
// cache there is one row, and each token needs a forward over all of it.
type decoder struct {
	t      *Trainer
	keeps  bool
	kept   [][]int32 // by slot, the tokens whose keys and values are cached, at positions from 0
	logits []float32 // of a row
}

// prefixCache holds, per row of data, the output of the frozen first layers, in slots of one
// size. A step uses it if it has every row of all ranks, because all ranks must run the same
// program, gathers included. Rows are never replaced: each epoch visits all samples, so
// replacing one would gain nothing.
type prefixCache struct {
	row    int64   // bytes
	slots  int64   // number of slots
	slotOf []int32 // slot by window of the data, from 1; the last entry is for a row of padding; 0: not cached

	mem  []byte // the host tier
	ctx  device.Context
	disk device.Disk // the disk tier
	// hot caches rows of the disk tier in memory (Config.DiskCache), by slot. Samples come in
	// any order and a dropped row is read again, so any policy will do; ristretto's needs
	// little locking.
	hot *ristretto.Cache[int64, []byte]

	mu   sync.Mutex
	used int64
}

// stepKey distinguishes steps that run different operations, or repeat them differently often.
type stepKey struct {
	section string
	repeats int
}

// stepAt is the state of a running step.
type stepAt struct {
	index   int    // steps done before it
	section string // the form of the step that runs
	repeats int    // of its phase that repeats; 0: as planned
	cached  bool   // the frozen layers' outputs come from the cache
	stopped bool   // the step is not finite, and ended before its update
	noNorm  bool   // the step ended before its gradient norm was known
	left    bool   // the step was abandoned between two micro-steps
	hyper   [graph.NumHyper]float64
	leaving leaving
}

// leaving lets a long step end between two micro-steps. Until the last one has begun, no parameter
// and no state has changed. Ranks reach a micro-step at different times, so the first to reach it
// decides for all.
type leaving struct {
	mu      sync.Mutex
	asked   func() error // an error means: abandon the step
	why     error        // the error of asked; nil: continue
	decided int          // micro-steps from 1 on for which the decision is made
	at      int          // the first micro-step that is skipped
}

// zero sets every state to zero.
func (t *Trainer) zero() error {
	if t.plan.Program.SectionOf(graph.SectionInit, graph.FormWhole) == nil {
		return nil
	}
	if err := t.ranks.Each("the initialisation", func(r *run.Rank) error { return r.Exec.RunSection(graph.SectionInit.String(), nil) }); err != nil {
		return fmt.Errorf("initialise: %w", err)
	}
	return nil
}

// updates says whether steps update parameters. They do not if all parameters are frozen.
func (t *Trainer) updates() bool {
	return t.plan.Program.SectionOf(graph.SectionStep, graph.FormWhole).Update() != nil
}
