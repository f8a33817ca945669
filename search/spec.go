// Package search looks for configurations: the fastest that fits the caps, changes that make a
// configuration fit, and the best choice of recomputation. It is pure: it takes a Spec, returns
// Specs with their plans and predicted times, and does no I/O. Its callers handle the syntax of
// choices and the messages about them.
package search

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/mesh"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
)

// Shape holds the parameters of a job's programs that a search may choose.
type Shape struct {
	Batch, Seq int // rows of a micro-batch of a rank, tokens of a row
	// Layers replaces the model's number of repeated blocks unless it is 0: searches plan few of
	// many equal ones.
	Layers    int
	Precision precision.Precision
}

// Job is the part of a configuration that a search cannot change. Several goroutines call its
// methods.
type Job interface {
	// At returns the forward programs of a shape, and what package plan takes beside
	// them; of that the search replaces what a Spec has of its own. The error is of a
	// shape that the job refuses.
	At(Shape) (plan.Spec, error)
	// Outside returns the bytes, by space, that a rank's process needs outside its arenas,
	// including those given in the plan's Config.
	Outside(*plan.Plan) [graph.NumSpaces]int64
}

// Spec is a configuration: the choices that a search may make, and the job. A search changes copies
// of it.
type Spec struct {
	Job   Job
	Plans *plan.Shared // state that plans share; nil: a search makes its own

	Ranks, ShardSize int
	Tensor           int           // neighbouring ranks that have the same data, as the Job plans them; 0: 1
	Pipeline         int           // stages of layers, as the Job plans them; 0: 1
	Schedule         mesh.Schedule // of the Pipeline, as the Job plans it
	Stage            int           // of ZeRO
	Batch, Seq       int           // as Shape's
	Accum            int
	// Shares are the micro-batches of each rank in a step; nil: Accum. Rows are those of a
	// step; 0: all that Accum, Batch and Ranks give.
	Shares []int
	Rows   int
	// SameRows is set if a step keeps its number of rows when the number of ranks changes.
	// Otherwise each rank keeps its number of rows.
	SameRows bool
	// Shapes are the shapes of all steps, this one first; nil: only this one. With several, a
	// search changes neither ranks nor micro-batch.
	Shapes     []graph.StepShape
	LayerOrder bool // effective with several micro-batches
	Prefetch   int
	Precision  precision.Precision
	Recompute  recompute.Options
	Auto       bool // choose Recompute: as little as the cap on device memory allows
	Offload    offload.Options
	// Disk is set if there is a disk tier.
	Disk bool
	// Capacity caps each memory space of a rank in bytes, 0: no cap. Outside is the bytes of each
	// space that the rank's device and caches need.
	Capacity, Outside [graph.NumSpaces]int64

	Layers int  // repeated blocks of the model; 0 or 1: none repeat
	Frozen bool // some parameters are not trained: layers differ
	// AutoOn returns the machine whose rates Auto uses, for a number of ranks; nil: the one on
	// which time is predicted.
	AutoOn   func(ranks int) *cost.Machine
	variant  *Variant // whose Job it is; nil: the job as asked for
	moreHost int64    // bytes per rank of a server with more memory; 0: as asked for
	// measurer has cached results of the job's configurations, for the search by Auto; nil: none.
	measurer *searcher
	// OrderChosen is set if a search chose another LayerOrder than the one asked for.
	OrderChosen bool
}

// dataRanks returns the degree of data parallelism: the number of ranks, or groups of ranks, with
// different rows.
func (s *Spec) dataRanks() int { return s.Ranks / max(s.Tensor, 1) / max(s.Pipeline, 1) }

// highest returns the highest possible stage of ZeRO: a pipeline shards neither parameters nor
// gradients.
func (s *Spec) highest() int {
	if s.Pipeline > 1 {
		return 1
	}
	return 3
}

// inLayers reports whether each block runs all micro-batches before the next one.
func (s *Spec) inLayers() bool { return s.Accum > 1 && s.LayerOrder }

// Variant is a similar job that gives other numbers, for ways out.
type Variant struct {
	Changes []Change // of Field Other
	Job     Job
}
