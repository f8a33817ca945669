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

// Request is what a caller asks for. It goes by value: what the device and the other
// processes say is filled into copies, so that nobody's Config is written to.
type Request struct {
	config.Config
	Hooks
	// Opened is the model that Config.Model names, with its files open; nil: they are opened
	// by their paths.
	Opened *Model
}

// Hooks change a plan for tests. None is part of a Config.
type Hooks struct {
	// Verify has the program verified after every pass.
	Verify bool
	// OffloadChunk is offload.Options.Chunk, where it is not 0.
	OffloadChunk int64
	// WholeGeneration keeps no keys and values: each token is a forward over all before
	// it, which is what the other way is compared with.
	WholeGeneration bool
}

// Resolved is a Request with what its model and folders say, read once, with defaults
// filled in. Plans and searches over it open no file. Only this file makes one, and
// nothing writes to it again: a test of package internal/deps holds that.
type Resolved struct {
	Request
	Shape  model.Config
	Chosen *search.Chosen // what Recompute "auto" came to; nil: not asked for, or not yet
}

// planner makes plans of a Resolved. It also holds what its plans share, which is large, so a Trainer
// keeps the Resolved and drops the planner.
type planner struct {
	*Resolved
	shared   *config.Shared
	dividing *cost.Machine // plan.Config.Dividing
}

// Resolve validates a request and reads what it names.
func (q Request) Resolve() (*Resolved, error) {
	p, err := q.resolve()
	return p.Resolved, err
}

// resolve is Resolve with what plans have in common.
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
	if q.Steps == 0 { // the data, once they are open, say how many Config.Epochs are
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
	// The caller's lists may change under the run.
	q.LoRA.Targets = slices.Clone(q.LoRA.Targets)
	q.RankShares, q.BatchSchedule = slices.Clone(q.RankShares), slices.Clone(q.BatchSchedule)
	q.Freeze, q.Int8, q.Epilogues, q.Allow = slices.Clone(q.Freeze), slices.Clone(q.Int8), slices.Clone(q.Epilogues), slices.Clone(q.Allow)
	return planner{Resolved: &Resolved{Request: q, Shape: h}, shared: common}, nil
}

// decidePacking decides whether rows hold several documents: conversations on a CPU do,
// unless they are not to.
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

// choosing is the same with what "auto" came to in its place.
func (p planner) choosing(chosen *search.Chosen) planner {
	r := *p.Resolved
	r.Recompute, r.Chosen = chosen.Recompute.String(), chosen
	return planner{Resolved: &r, shared: p.shared, dividing: p.dividing}
}

// beside is the same on a device that is known to take so many bytes outside the arenas.
func (r *Resolved) Beside(outside int64) *Resolved {
	measured := *r
	measured.Outside[graph.Device] = outside
	return &measured
}
