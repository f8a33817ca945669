// Package search looks for configurations: the fastest that fits the caps, what makes
// one fit that does not, and what is best computed again. It is pure: a Spec goes in,
// Specs with their plans and predicted times come out, and nothing is read or written.
// How choices are typed, and the sentences about them, are its callers'.
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

// Shape is what the programs of a job depend on beside the job.
type Shape struct {
	Batch, Seq int // rows of a micro-batch of a rank, tokens of a row
	// Layers replaces the model's number of repeated blocks where it is not 0: searches
	// plan few of many that are alike.
	Layers    int
	Precision precision.Precision
}

// Job is what a search can't change. Its methods are called by several goroutines.
type Job interface {
	// At returns the forward programs of a shape, and what package plan takes beside
	// them; of that the search replaces what a Spec has of its own. The error is of a
	// shape that the job refuses.
	At(Shape) (plan.Spec, error)
	// Outside returns what a rank's process needs of each space outside its arenas, in
	// bytes, with what the plan was told of it.
	Outside(*plan.Plan) [graph.NumSpaces]int64
}

// Spec is a configuration: what a search may choose, and the job. A search changes
// copies of it.
type Spec struct {
	Job   Job
	Plans *plan.Shared // what plans have in common; nil: a search makes its own

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
	// SameRows says that a step keeps its number of rows when the number of ranks changes. Otherwise each
	// rank keeps its number of rows.
	SameRows bool
	// Shapes are those that steps have, this one the first; nil: this one alone. What has
	// several keeps its ranks and its micro-batch.
	Shapes     []graph.StepShape
	LayerOrder bool // where there are several micro-batches
	Prefetch   int
	Precision  precision.Precision
	Recompute  recompute.Options
	Auto       bool // Recompute is to be chosen: as little as the cap on device memory asks for
	Offload    offload.Options
	// Disk says that there is a disk tier.
	Disk bool
	// Capacity caps each memory space of a rank in bytes, 0: no cap; Outside is what the
	// rank's device and caches take of each.
	Capacity, Outside [graph.NumSpaces]int64

	Layers int  // repeated blocks of the model; 0 or 1: none repeat
	Frozen bool // some parameters are not trained: layers differ
	// AutoOn is the machine by whose rates Auto chooses for so many ranks; nil: the
	// one that the time is predicted on.
	AutoOn   func(ranks int) *cost.Machine
	variant  *Variant // whose Job it is; nil: the job as asked for
	moreHost int64    // bytes a rank of a server with more memory; 0: as asked for
	// measurer has what configurations of the job came to, for the search that Auto asks for; nil: none.
	measurer *searcher
	// OrderChosen says that a search chose LayerOrder against what was asked for.
	OrderChosen bool
}

// dataRanks is the number of ranks with data of their own.
func (s *Spec) dataRanks() int { return s.Ranks / max(s.Tensor, 1) / max(s.Pipeline, 1) }

// highest is the highest stage of ZeRO: a pipeline shards neither parameters nor gradients.
func (s *Spec) highest() int {
	if s.Pipeline > 1 {
		return 1
	}
	return 3
}

// inLayers says whether each block runs all micro-batches before the next one.
func (s *Spec) inLayers() bool { return s.Accum > 1 && s.LayerOrder }

// Variant is the same job with other numbers, for ways out.
type Variant struct {
	Changes []Change // of Field Other
	Job     Job
}
