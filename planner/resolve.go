package planner

import (
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/search"
)

// Request is a caller's request. It is passed by value: values from the device and from other
// processes are set in copies, so that the caller's Config does not change.
type Request struct {
	config.Config
	Hooks
	// Opened is the model that Config.Model names, with its files open; nil: they are opened
	// by their paths.
	Opened *Model
}

// Hooks change a plan for tests. None is part of a Config.
type Hooks struct {
	// Verify verifies the program after every pass.
	Verify bool
	// OffloadChunk replaces offload.Options.Chunk unless it is 0.
	OffloadChunk int64
	// WholeGeneration caches no keys and values: each token is a forward over all tokens before it.
	// Tests compare generation with the cache to it.
	WholeGeneration bool
}

// Resolved is a Request with the shape of its model, and with defaults filled in. Files and folders
// are read once: plans and searches over it open no file. Only this file makes one, and nothing
// writes to it again: a test of package internal/deps checks that.
type Resolved struct {
	Request
	Shape  model.Config
	Chosen *search.Chosen // the choice of Recompute "auto"; nil: not asked for, or not made yet
}

// planner makes plans of a Resolved. It also holds the state that its plans share. That is large,
// so a Trainer keeps the Resolved and drops the planner.
type planner struct {
	*Resolved
	shared   *config.Shared
	dividing *cost.Machine // plan.Config.Dividing
}

// Resolve validates a request and reads the files that it names.
func (q Request) Resolve() (*Resolved, error) {
	p, err := q.resolve()
	return p.Resolved, err
}

// resolve is Resolve with the state that plans share.
func (q Request) resolve() (planner, error) {
	if err := q.Validate(); err != nil {
		return planner{}, err
	}
	var err error
	if q.Config, err = q.FollowGlobalBatch(false); err != nil {
		return planner{}, err
	}
	if err := q.RefuseFloor(); err != nil {
		return planner{}, err
	}
	common := q.Common()
	if q.Steps == 0 { // Config.Epochs gives the number once the data are open
		q.Steps = config.Default().Steps
	}
	if q.Seq == 0 && q.Own.Model != nil {
		q.Seq = 1
	}
	h, err := q.modelShape(common)
	if err != nil {
		return planner{}, err
	}
	if q.Inference && !q.LoRA.Active() {
		if q.LoRA, err = q.modelAdapters(); err != nil {
			return planner{}, err
		}
	}
	if q.Seq == 0 {
		q.Seq = min(256, h.Positions)
	}
	if q.Seq > h.Positions {
		return planner{}, config.Refuse("Config.Seq %d is over the model's %d positions", q.Seq, h.Positions)
	}
	if q.Tokenizer == "" && q.ReadsText() {
		q.Tokenizer = ModelTokenizer(&q.Config, q.Opened, h.Vocab)
	}
	if err := q.decidePacking(); err != nil {
		return planner{}, err
	}
	// The caller may change its lists during the run.
	q.LoRA.Targets = slices.Clone(q.LoRA.Targets)
	q.RankShares, q.BatchSchedule = slices.Clone(q.RankShares), slices.Clone(q.BatchSchedule)
	q.Freeze, q.Int8, q.Epilogues, q.Allow = slices.Clone(q.Freeze), slices.Clone(q.Int8), slices.Clone(q.Epilogues), slices.Clone(q.Allow)
	return planner{Resolved: &Resolved{Request: q, Shape: h}, shared: common}, nil
}

// decidePacking decides whether rows hold several documents, if Config.Packing is not set: they do
// for conversations on a CPU.
func (q *Request) decidePacking() error {
	if q.Packing != "" {
		return nil
	}
	q.Packing = config.PackingOff
	path, glob := q.Data, q.DataGlob
	if q.Inference {
		path, glob = q.EvalData, q.EvalGlob
	}
	if q.Own.Data != nil || q.Own.Model != nil || q.DeviceTarget().Name != graph.CPUTarget().Name {
		return nil
	}
	is, err := data.IsConversations(path, data.Options{TextField: q.TextField, Glob: glob})
	if is {
		q.Packing = config.PackingOn
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}

// choosing returns p with the choice of Recompute "auto" in its place.
func (p planner) choosing(chosen *search.Chosen) planner {
	r := *p.Resolved
	r.Recompute, r.Chosen = chosen.Recompute.String(), chosen
	return planner{Resolved: &r, shared: p.shared, dividing: p.dividing}
}

// Beside returns r for a device that is known to need outside bytes per rank outside the arenas.
func (r *Resolved) Beside(outside int64) *Resolved {
	measured := *r
	measured.Outside[graph.Device] = outside
	return &measured
}
