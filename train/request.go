package train

import (
	"context"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/platform/gpu"
)

// request is what a caller asks for, and what tests add to it. It goes by value: what the
// device and the other processes say is filled into copies, so that nobody's Config is
// written to.
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
	// opened is planner.Request.Opened. It is no test's.
	opened *planner.Model
	// folders opens the folder of checkpoints; nil: filesys.System.
	folders filesys.Opener
	// wrapDisk puts something between the disk tier and its files.
	wrapDisk func(rank int, f store.RawFile) store.RawFile
	// wrapDevice takes the place of a rank's device context.
	wrapDevice func(rank int, ctx device.Context) device.Context
	// cuda takes the place of the machine's driver, compiler and libraries.
	cuda *gpu.Parts
	// offloadChunk and wholeGeneration are those of planner.Hooks.
	offloadChunk    int64
	wholeGeneration bool
}

// resolved is a request that the planner has resolved. Nothing writes to it.
type resolved struct {
	*planner.Resolved
	hooks
}

// planned is the request as the planner takes it.
func (q request) planned() planner.Request {
	return planner.Request{Config: q.Config, Hooks: planner.Hooks{Verify: q.poison, OffloadChunk: q.offloadChunk, WholeGeneration: q.wholeGeneration}, Opened: q.opened}
}

// build plans a request.
func (q request) build(ctx context.Context) (*plan.Plan, *resolved, error) {
	p, r, err := q.planned().Build(ctx)
	if err != nil {
		return nil, nil, err
	}
	return p, &resolved{r, q.hooks}, nil
}

// with is the same with what is known once the data are open: their tokenizer and order, and
// the steps that epochs come to.
func (r *resolved) with(tokenizer, order string, steps int) *resolved {
	changed := *r.Resolved
	changed.Tokenizer, changed.Order, changed.Steps = tokenizer, order, steps
	return &resolved{&changed, r.hooks}
}

// beside is the same on a device that is known to take so many bytes outside the arenas.
func (r *resolved) beside(outside int64) *resolved {
	return &resolved{r.Resolved.Beside(outside), r.hooks}
}
