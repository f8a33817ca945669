// Package plan turns a model's forward programs and a Config into a Plan: the program that every
// rank runs, and the place of each of its buffers in memory. It needs no device, no weights and no
// data.
package plan

import (
	"errors"
	"fmt"

	"github.com/docker/go-units"

	"github.com/spillway-ml/spillway/fsdp"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/lora"
	"github.com/spillway-ml/spillway/memplan"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/mesh"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
	"github.com/spillway-ml/spillway/zero"
)

// Forward holds a model's forward programs, each with one section of one phase,
// over the same parameters. Eval and Generate may be nil.
type Forward struct {
	Train, Eval, Generate *graph.Program
	// Next generates one token with the keys and values that Generate has cached; nil if
	// Generate caches none.
	Next *graph.Program
}

// Config has the settings on which a run's program and memory depend.
type Config struct {
	Ranks        int               // world size
	Stage        zero.Stage        // ZeRO stage over all ranks
	Accum        int               // rounds of micro-batches a step
	Shares       []int             // by rank: micro-batches in a step, at most Accum; nil: Accum on every rank
	Shapes       []graph.StepShape // all shapes of the run's steps, that of Accum and Shares first; nil: only that
	LayerOrder   bool              // each block runs for all micro-batches before the next block starts
	Reproducible bool              // the bits depend on the step's micro-batches and their order, not on stage and ranks
	Prefetch     int               // stage 3: units that are gathered ahead of their use
	Serial       bool              // collectives never overlap computation, to measure what overlap gains
	Recompute    recompute.Options
	Offload      offload.Options // its field Ahead is set to Prefetch
	Freeze       []string        // patterns of parameters that are not trained
	LoRA         lora.Options    // adapters, which are trained instead of the model's parameters
	CachePrefix  bool            // a cache on the host may replace the frozen first layers
	Rows         int64           // rows of a micro-batch; needed with CachePrefix
	Optimizer    zero.Optimizer
	Clip         float64 // largest global gradient norm, 0: off
	Target       graph.Target

	// SkipNonFinite skips the update of a step, on all ranks, if the norm of its gradients is
	// not finite. Updates then wait for the norm, as with Clip.
	SkipNonFinite bool
	// Noise also sums the squares of a step's leaves (graph.Gradient), for the gradient noise
	// scale. It needs Reproducible, and has an effect if a step has at least two leaves.
	Noise bool

	Precision precision.Precision
	Reduce32  bool // gradients of a 16-bit precision are sent and stored in fp32
	// Int8 says whether products are computed in int8, and whether activations are stored in
	// int8 between forward and backward.
	Int8 precision.Int8
	// Epilogues are the chosen fusions of 16-bit products, as far as the target can do them;
	// zero: the target's default.
	Epilogues graph.Epilogues
	// Int8Gather gathers parameters in int8, Int8Reduce sends gradients in int8 (package
	// fsdp).
	Int8Gather, Int8Reduce bool
	// Base is the type in which frozen units are stored.
	Base fsdp.Base
	// ShardSize is the number of ranks that share one copy of the states (HSDP). The mesh is
	// then Ranks/ShardSize replicas by ShardSize shards, and neighbouring ranks form a shard
	// group. 0: all ranks share one copy.
	ShardSize int
	// Tensor is the number of ranks that share the computation of each layer (package mesh):
	// neighbouring ranks. The other ranks share the data. 0 or 1: none. Slices is the number of
	// slices of a layer, at least 2, whose sums are added in their order; 0: no slices.
	Tensor, Slices int
	// Pipeline is the number of stages over which the blocks are divided (package mesh); 0 or 1:
	// one. Stages has the first layer of each, Schedule the order of their micro-batches.
	Pipeline int
	Stages   []int
	Schedule mesh.Schedule
	// Dividing predicts the times by which layers are divided over stages if Stages is nil. All
	// ranks and plans of a job must use the same rates, so they are never measured. nil: the rates
	// of a typical CPU core.
	Dividing *cost.Machine

	// Capacity caps each memory space of a rank, in bytes; 0: no cap.
	Capacity [graph.NumSpaces]int64
	// Outside is the memory in bytes that the process needs of each space outside the arena.
	// It counts against the capacity.
	Outside [graph.NumSpaces]int64
	// Staging is the part of Outside's host memory that holds a copy of a rank's states
	// while an asynchronous checkpoint is written; 0: saves are synchronous, or there are
	// none. Build does not read it.
	Staging int64
	// SaveBuffer is the size in bytes of the buffer that a synchronous save uses on a rank.
	SaveBuffer int64
	// Early makes Build return a *DoesNotFit as soon as a lower bound exceeds a capacity,
	// before buffers are placed. It is for searches, which plan many configurations.
	Early bool
	// BoundsOnly skips placing the buffers: Plan.Layout then has only Spaces, with the lower
	// bound as the peak.
	BoundsOnly bool
	// Verify also checks the order of operations after every pass that leaves it complete (tests
	// always do). Without it the structure is checked after the passes before the mesh, and both
	// after the last pass.
	Verify bool
	// Observe, if not nil, is called with the model's program and the program after each
	// pass. It must not change them. Its error ends the planning.
	Observe func(pass string, p *graph.Program) error
	// Stop, if not nil, is called before each pass and while buffers are placed, from several
	// goroutines. Its error ends the planning.
	Stop func() error
}

// stopped is the error of Config.Stop. It says nothing about the configuration, so results
// with it are not kept.
type stopped struct{ error }

func (s *stopped) Unwrap() error { return s.error }

// goOn returns the error of Config.Stop, nil if planning may continue.
func (c *Config) goOn() error {
	if c.Stop == nil {
		return nil
	}
	if err := c.Stop(); err != nil {
		return &stopped{err}
	}
	return nil
}

// ErrRefused matches, with errors.Is, errors about a configuration that is not valid for any run.
var ErrRefused = errors.New("the configuration is refused")

// Refused returns an error of kind ErrRefused with the text of err.
func Refused(err error) error { return &refused{err} }

type refused struct{ error }

func (r *refused) Is(target error) bool { return target == ErrRefused }
func (r *refused) Unwrap() error        { return r.error }

// Validate returns an error of kind ErrRefused if a value is out of range.
func (c Config) Validate() error {
	if err := c.validate(); err != nil {
		return Refused(err)
	}
	return nil
}

func (c Config) validate() error {
	switch {
	case c.Ranks < 1:
		return fmt.Errorf("ranks: %d; at least 1 is needed", c.Ranks)
	case c.Accum < 1:
		return fmt.Errorf("accum: %d; at least 1 micro-step is needed", c.Accum)
	case c.Prefetch < 0:
		return fmt.Errorf("prefetch: %d is negative; 0 gathers a unit when it is needed, 1 one unit ahead", c.Prefetch)
	case c.CachePrefix && c.Rows < 1:
		return fmt.Errorf("rows: %d; the cache of a frozen beginning needs the rows of a micro-batch", c.Rows)
	case !(c.Clip >= 0):
		return fmt.Errorf("clip: %g is negative or not a number; 0 turns clipping off", c.Clip)
	}
	if err := c.validateMesh(); err != nil {
		return err
	}
	for s, v := range c.Capacity {
		if v < 0 {
			return fmt.Errorf("%s memory cap: %d bytes is negative", graph.Space(s), v)
		}
		if c.Outside[s] < 0 {
			return fmt.Errorf("%s memory outside the arena: %d bytes is negative", graph.Space(s), c.Outside[s])
		}
	}
	if _, err := zero.ParseStage(int(c.Stage)); err != nil {
		return err
	}
	return c.Optimizer.Validate()
}

// Plan is the program of a run and the exact memory that it needs.
type Plan struct {
	Config  Config
	Program *graph.Program // of all ranks
	Roles   []Role         // one for each stage of a pipeline
	// Layout holds, for each space, the SpaceUse of the role that needs the most of it (Largest).
	// Its offsets are those of the role that needs the most device memory.
	Layout *memplan.Layout

	// CommBytes is the number of bytes that a rank sends in a step; in a pipeline, the rank that
	// sends the most. Collectives count as rings: a gather, a scatter or an exchange as the padded
	// buffer · (N−1)/N, an all-reduce as twice that. Scalars and exact accumulators do not count.
	CommBytes int64
	// UsedTwice names, in layer order, the trained parameters that several blocks use
	// (see OwnSums).
	UsedTwice []string
}

// Build runs the passes in order and plans the memory. It compares the result with the
// capacities only if Config.Early is set; Plan.Fit compares it in any case.
func Build(fwd Forward, cfg Config) (*Plan, error) { return (*Shared)(nil).Build(fwd, cfg) }

// overBound returns a *DoesNotFit for the first space whose lower bound exceeds its capacity.
func overBound(bounds [graph.NumSpaces]memplan.SpaceUse, cfg Config) error {
	for s := range graph.NumSpaces {
		if limit := cfg.Capacity[s]; limit > 0 && bounds[s].LowerBound+cfg.Outside[s] > limit {
			return &DoesNotFit{Space: s, Peak: bounds[s].LowerBound, Outside: cfg.Outside[s], Capacity: limit, At: bounds[s].PeakAt, Largest: largestClasses(&bounds[s])}
		}
	}
	return nil
}

// DoesNotFit is the error of a plan that exceeds a capacity.
type DoesNotFit struct {
	Space    graph.Space
	Peak     int64  // bytes planned
	Outside  int64  // bytes that the process needs outside the arena
	Capacity int64  // bytes allowed
	At       string // section/phase/operation of the peak
	Largest  string // text: the largest classes at the peak
}

// ErrDoesNotFit matches every *DoesNotFit with errors.Is.
var ErrDoesNotFit = errors.New("does not fit")

// Is reports whether target is ErrDoesNotFit.
func (e *DoesNotFit) Is(target error) bool { return target == ErrDoesNotFit }

func (e *DoesNotFit) Error() string {
	outside := ""
	if e.Outside > 0 {
		outside = " and " + Bytes(e.Outside) + " outside its arena"
	}
	text := fmt.Sprintf("does not fit: a rank needs %s of %s memory%s and the cap is %s (%s over)",
		Bytes(e.Peak), e.Space, outside, Bytes(e.Capacity), exactly(e.Peak+e.Outside-e.Capacity))
	if e.Peak > 0 { // an empty arena has no peak
		text += fmt.Sprintf("; the peak is at %s: %s", e.At, e.Largest)
	}
	return text
}

// exactly formats a number of bytes like Bytes, with the word bytes below 1 KiB.
func exactly(n int64) string {
	if n == 1 {
		return "1 byte"
	}
	if n < 1024 {
		return fmt.Sprintf("%d bytes", n)
	}
	return Bytes(n)
}

// Fit returns nil if the peak of every space plus Config.Outside is within its capacity,
// otherwise the joined *DoesNotFit errors.
func (p *Plan) Fit() error {
	var errs []error
	for s := range graph.NumSpaces {
		use, limit, outside := &p.Layout.Spaces[s], p.Config.Capacity[s], p.Config.Outside[s]
		if limit > 0 && use.Peak+outside > limit {
			errs = append(errs, &DoesNotFit{Space: s, Peak: use.Peak, Outside: outside, Capacity: limit, At: use.PeakAt, Largest: largestClasses(use)})
		}
	}
	return errors.Join(errs...)
}

func largestClasses(use *memplan.SpaceUse) string {
	text := ""
	var done [graph.NumClasses]bool
	for range 4 {
		best := -1
		for c, n := range use.ByClass {
			if n > 0 && !done[c] && (best < 0 || n > use.ByClass[best]) {
				best = c
			}
		}
		if best < 0 {
			break
		}
		done[best] = true
		if text != "" {
			text += ", "
		}
		text += fmt.Sprintf("%s %s", graph.Class(best), Bytes(use.ByClass[best]))
	}
	return text
}

// binaryUnits are the units that Bytes prints, in steps of 1024.
var binaryUnits = []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB"}

// Bytes formats a size in binary units.
func Bytes(n int64) string {
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	return units.CustomSize("%.2f %s", float64(n), 1024, binaryUnits)
}

// CommBytes returns the bytes that a rank sends in one run of section "step" (see
// Plan.CommBytes).
func CommBytes(p *graph.Program) int64 {
	sec := p.SectionOf(graph.SectionStep, graph.FormWhole)
	if sec == nil {
		return 0
	}
	var total int64
	for i := range sec.Phases {
		ph := &sec.Phases[i]
		var sum int64
		for k := range ph.Ops {
			sum += OpCommBytes(p, &ph.Ops[k])
		}
		total += sum * int64(ph.Repeat)
	}
	return total
}

// OpCommBytes returns the bytes that a rank sends for one collective; 0 for any other
// operation and for reductions of scalars and accumulators (f64, i64).
func OpCommBytes(p *graph.Program, op *graph.Op) int64 {
	var whole *graph.Buffer
	times := int64(1)
	switch op.Kind {
	case graph.AllGather:
		whole = p.Buf(op.Out[0].Buf)
	case graph.ReduceScatter, graph.AllToAll:
		whole = p.Buf(op.In[0])
	case graph.AllReduce:
		whole, times = p.Buf(op.Out[0].Buf), 2
	case graph.Send:
		return p.Buf(op.In[0]).Bytes()
	default:
		return 0
	}
	if whole.DType == graph.F64 || whole.DType == graph.I64 {
		return 0
	}
	n := int64(p.WorldSize())
	if axis := op.Attr.(graph.GroupAttr).Axis; axis >= 0 {
		n = int64(p.Mesh[axis].Size)
	}
	return times * whole.Bytes() * (n - 1) / n
}

// Hash returns the SHA-256 of the program's text form. All ranks of a job must have the same.
func (p *Plan) Hash() string { return graph.Hash(p.Program) }

// Spec is the input of the passes besides the program.
type Spec struct {
	Config
	Forward Forward
}

// Role is the program that the ranks of one pipeline stage run, and its memory. Without a pipeline
// there is one role, with the plan's program.
type Role struct {
	Program   *graph.Program
	Layout    *memplan.Layout
	CommBytes int64 // bytes that a rank sends in a step (Plan.CommBytes)

	ids      []graph.BufID     // by ID in the plan's program: see Own; nil: the same
	analysis *memplan.Analysis // kept until there is a layout; nil: not made yet
}

// Own returns the ID in the role's program of a buffer of the plan's program, NoBuf if the role
// does not use it.
func (r *Role) Own(id graph.BufID) graph.BufID {
	switch {
	case r.ids == nil:
		return id
	case id < 0 || int(id) >= len(r.ids):
		return graph.NoBuf
	}
	return r.ids[id]
}

// stages returns the number of roles.
func (c Config) stages() int { return max(c.Pipeline, 1) }

// inLayers reports whether one phase has all micro-batches of a step: in layer order, or in the
// turns of a pipeline's stages.
func (c Config) inLayers() bool { return (c.LayerOrder || c.Pipeline > 1) && c.Accum > 1 }
