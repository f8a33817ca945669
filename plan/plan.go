// Package plan turns a model's forward programs and a Config into a Plan: the
// program that every rank runs, and where each of its buffers lies. It needs no
// device, no weights and no data.
package plan

import (
	"errors"
	"fmt"

	"github.com/docker/go-units"

	"github.com/spillway-ml/spillway/fsdp"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/lora"
	"github.com/spillway-ml/spillway/memplan"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
	"github.com/spillway-ml/spillway/zero"
)

// Forward holds a model's forward programs, each with one section of one phase,
// over the same parameters. Eval and Generate may be nil.
type Forward struct {
	Train, Eval, Generate *graph.Program
	// Next is generation by one token with the keys and values that Generate keeps;
	// nil where it keeps none.
	Next *graph.Program
}

// Config is what shapes a run's program and memory.
type Config struct {
	Ranks        int               // world size
	Stage        zero.Stage        // ZeRO stage over all ranks
	Accum        int               // rounds of micro-batches a step
	Shares       []int             // micro-batches of each rank in a step, Accum at most; nil: all have Accum
	Shapes       []graph.StepShape // those that steps have, Accum and Shares the first; nil: these alone
	LayerOrder   bool              // each block goes through all of them before the next one is touched
	Reproducible bool              // sums over the micro-batches of a step have one order: the bits depend on them alone, not on stage and ranks
	Prefetch     int               // units gathered ahead of their use at stage 3
	Serial       bool              // collectives and computation take turns, to see what their overlap gives
	Recompute    recompute.Options
	Offload      offload.Options // its Ahead is Prefetch
	Freeze       []string        // patterns of parameters that are not trained
	LoRA         lora.Options    // adapters, which are trained in the model's place
	CachePrefix  bool            // the value that a frozen beginning hands on comes from the host where it has it
	Rows         int64           // rows of a micro-batch; needed with CachePrefix
	Optimizer    zero.Optimizer
	Clip         float64 // largest global gradient norm, 0: off
	Target       graph.Target

	// SkipNonFinite leaves the update of a step out, on all ranks, where the norm of
	// its gradients is not finite: updates wait for the norm, as with Clip.
	SkipNonFinite bool
	// Noise sums the squares of a step's leaves beside the leaves, for the gradient noise
	// scale: with Reproducible, where a step has at least two.
	Noise bool

	Precision precision.Precision
	Reduce32  bool // gradients of a 16-bit precision travel and rest in fp32
	// Int8 has products, and activations that wait for the backward, in int8.
	Int8 precision.Int8
	// Epilogues are what 16-bit products do besides multiplying, where the target's can;
	// zero: its default.
	Epilogues graph.Epilogues
	// Int8Gather gathers parameters as quantised values, Int8Reduce sends gradients so
	// (package fsdp).
	Int8Gather, Int8Reduce bool
	// Base is the type in which frozen units rest.
	Base fsdp.Base
	// ShardSize is how many ranks share the states (HSDP): ranks are a mesh of
	// Ranks/ShardSize replicas by ShardSize shards, neighbours in one shard group.
	// 0: all ranks.
	ShardSize int

	// Capacity caps each memory space of a rank, in bytes; 0: no cap.
	Capacity [graph.NumSpaces]int64
	// Outside is what the process needs of each space outside the arena: it
	// counts against the capacity.
	Outside [graph.NumSpaces]int64
	// Staging is how much of Outside's host memory holds a rank's states while a
	// checkpoint of them is written beside the steps; 0: saves are synchronous, or there
	// are none. Build does not look at it.
	Staging int64
	// SaveBuffer is what a synchronous save goes through, bytes of a rank.
	SaveBuffer int64
	// Early makes Build refuse, with a *DoesNotFit and before it gives buffers a
	// place, what cannot fit: searches plan many configurations.
	Early bool
	// BoundsOnly stops before buffers get a place: of Plan.Layout there are only
	// the spaces, with the lower bound as the peak.
	BoundsOnly bool
	// Verify checks the order of operations after every pass that leaves one to
	// check (tests always do). The structure is checked after every pass, and the
	// order after the last, without it.
	Verify bool
	// Observe, where it is not nil, is shown the model's program and the program
	// after each pass. It must not change them; its error ends the planning.
	Observe func(pass string, p *graph.Program) error
	// Stop, where it is not nil, is asked before each pass and while buffers get their
	// places, also by several goroutines. Its error ends the planning.
	Stop func() error
}

// stopped is the error of Config.Stop, which says nothing of the configuration.
type stopped struct{ error }

func (s *stopped) Unwrap() error { return s.error }

// goOn asks Config.Stop.
func (c *Config) goOn() error {
	if c.Stop == nil {
		return nil
	}
	if err := c.Stop(); err != nil {
		return &stopped{err}
	}
	return nil
}

// Validate refuses values out of range.
func (c Config) Validate() error {
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

// Plan is what a run does and the memory that it takes, exactly.
type Plan struct {
	Config  Config
	Program *graph.Program
	Layout  *memplan.Layout

	// CommBytes is what a rank sends in a step, ring-equivalent: for a gather or
	// a scatter or an exchange the padded buffer · (N−1)/N, twice that for an all-reduce;
	// scalars and exact accumulators are left out.
	CommBytes int64
	// UsedTwice names, in layer order, the trained parameters that several blocks use
	// (see OwnSums).
	UsedTwice []string
}

// Build runs the passes in order and plans the memory. It does not look at the
// capacities: Fit does.
func Build(fwd Forward, cfg Config) (*Plan, error) { return (*Shared)(nil).Build(fwd, cfg) }

// cannotFit refuses a program whose lower bound of a space is over its cap.
func cannotFit(p *graph.Program, cfg Config) error {
	bounds, err := memplan.Bounds(p)
	if err != nil {
		return fmt.Errorf("plan: memory: %w", err)
	}
	return overBound(bounds, cfg)
}

// overBound refuses lower bounds over a cap.
func overBound(bounds [graph.NumSpaces]memplan.SpaceUse, cfg Config) error {
	for s := range graph.NumSpaces {
		if limit := cfg.Capacity[s]; limit > 0 && bounds[s].LowerBound+cfg.Outside[s] > limit {
			return &DoesNotFit{Space: s, Peak: bounds[s].LowerBound, Outside: cfg.Outside[s], Capacity: limit, At: bounds[s].PeakAt, Largest: largestClasses(&bounds[s])}
		}
	}
	return nil
}

// DoesNotFit is the refusal of a plan over a capacity.
type DoesNotFit struct {
	Space    graph.Space
	Peak     int64  // bytes planned
	Outside  int64  // bytes that the process needs beside them
	Capacity int64  // bytes allowed
	At       string // section/phase/operation of the peak
	Largest  string // largest classes there, for a person
}

// ErrDoesNotFit is what errors.Is finds in every *DoesNotFit.
var ErrDoesNotFit = errors.New("does not fit")

// Is says that the error is an ErrDoesNotFit.
func (e *DoesNotFit) Is(target error) bool { return target == ErrDoesNotFit }

func (e *DoesNotFit) Error() string {
	outside := ""
	if e.Outside > 0 {
		outside = " and " + Bytes(e.Outside) + " outside its arena"
	}
	text := fmt.Sprintf("does not fit: a rank needs %s of %s memory%s and the cap is %s (%s over)",
		Bytes(e.Peak), e.Space, outside, Bytes(e.Capacity), exactly(e.Peak+e.Outside-e.Capacity))
	if e.Peak > 0 { // an arena has a peak
		text += fmt.Sprintf("; the peak is at %s: %s", e.At, e.Largest)
	}
	return text
}

// exactly is a number of bytes in words, to the byte where sizes in their units would not
// tell.
func exactly(n int64) string {
	if n == 1 {
		return "1 byte"
	}
	if n < 1024 {
		return fmt.Sprintf("%d bytes", n)
	}
	return Bytes(n)
}

// Fit returns nil if every space's peak, with what is outside, is within its
// capacity, otherwise the
// joined *DoesNotFit errors.
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

// binaryUnits are those that Bytes prints, from 1024 up.
var binaryUnits = []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB"}

// Bytes prints a size for a person, in binary units.
func Bytes(n int64) string {
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	return units.CustomSize("%.2f %s", float64(n), 1024, binaryUnits)
}

// CommBytes returns what a rank sends in one run of section "step" (see
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

// OpCommBytes returns what a rank sends for one collective; 0 for any other
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

// Hash is the SHA-256 of the program's text form: ranks of one job must have the
// same.
func (p *Plan) Hash() string { return graph.Hash(p.Program) }
