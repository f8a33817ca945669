package train

import (
	"slices"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/hfconfig"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/platform/gpu"
	"github.com/spillway-ml/spillway/search"
)

// request is what a caller asks for. It goes by value: what the device and the other
// processes say is filled into copies, so that nobody's Config is written to.
type request struct {
	config.Config
	hooks
}

// hooks let tests look into a run and break it. None is part of a Config; the first two
// hold in all processes of a job, the others in this one.
type hooks struct {
	// poison fills released and unused device memory with NaN patterns, and verifies the
	// program after every pass.
	poison bool
	// checkWrites runs one kernel at a time and looks for writes outside of what it
	// declares, on all ranks. Very slow.
	checkWrites bool
	// folders opens the folder of checkpoints; nil: filesys.System.
	folders filesys.Opener
	// wrapDisk puts something between the disk tier and its files.
	wrapDisk func(rank int, f store.RawFile) store.RawFile
	// wrapDevice takes the place of a rank's device context.
	wrapDevice func(rank int, ctx device.Context) device.Context
	// cuda takes the place of the machine's driver, compiler and libraries.
	cuda *gpu.Parts
	// offloadChunk is offload.Options.Chunk, where it is not 0.
	offloadChunk int64
	// wholeGeneration keeps no keys and values: each token is a forward over all before
	// it, which is what the other way is held to.
	wholeGeneration bool
}

// resolved is a request with what its model and folders say, read once, with defaults
// filled in. Plans and searches over it open no file. Only this file makes one, and
// nothing writes to it again: a test of package internal/deps holds that.
type resolved struct {
	request
	model  hfconfig.Config
	chosen *search.Chosen // what Recompute "auto" came to; nil: not asked for, or not yet
}

// planner plans what is resolved. What its plans have in common is held as long as it
// is there, so that a Trainer keeps the resolved alone.
type planner struct {
	*resolved
	shared *config.Shared
}

// resolve validates a request and reads what it names.
func (q request) resolve() (planner, error) {
	if err := q.Validate(); err != nil {
		return planner{}, err
	}
	common := q.Common()
	if q.Seq == 0 && q.Own.Model != nil {
		q.Seq = 1
	}
	h, err := modelShape(&q.Config, common)
	if err != nil {
		return planner{}, err
	}
	if q.Seq == 0 {
		q.Seq = min(256, h.Positions)
	}
	if q.Seq > h.Positions {
		return planner{}, config.Refuse("Config.Seq %d is over the model's %d positions", q.Seq, h.Positions)
	}
	if q.Tokenizer == "" && q.ReadsText() {
		q.Tokenizer = modelTokenizer(&q.Config, h.Vocab)
	}
	// The caller's lists may change under the run.
	q.Freeze, q.Int8, q.Epilogues, q.Allow = slices.Clone(q.Freeze), slices.Clone(q.Int8), slices.Clone(q.Epilogues), slices.Clone(q.Allow)
	return planner{&resolved{request: q, model: h}, common}, nil
}

// choosing is the same with what "auto" came to in its place.
func (p planner) choosing(chosen *search.Chosen) planner {
	r := *p.resolved
	r.Recompute, r.chosen = chosen.Recompute.String(), chosen
	return planner{&r, p.shared}
}

// beside is the same on a device that is known to take so many bytes outside the arenas.
func (r *resolved) beside(outside int64) *resolved {
	measured := *r
	measured.Outside[graph.Device] = outside
	return &measured
}
