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

// request is a caller's Config and what tests add to it. It is passed by value: values from the
// device and the other processes are filled into copies, so that no caller's Config changes.
type request struct {
	config.Config
	hooks
}

// hooks let tests inspect a run and inject faults. They are not part of Config. The first two apply
// in all processes of a job, the others only in this one.
type hooks struct {
	// poison fills released and unused device memory with NaN patterns, and verifies the
	// program after every pass.
	poison bool
	// checkWrites runs one kernel at a time, on all ranks, and looks for writes outside its
	// declared outputs. Very slow.
	checkWrites bool
	// opened is planner.Request.Opened. Not only tests set it.
	opened *planner.Model
	// folders opens the folder of checkpoints; nil: filesys.System.
	folders filesys.Opener
	// wrapDisk wraps a rank's file of the disk tier.
	wrapDisk func(rank int, f store.RawFile) store.RawFile
	// wrapDevice wraps a rank's device context.
	wrapDevice func(rank int, ctx device.Context) device.Context
	// cuda replaces the machine's driver, compiler and libraries.
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

// planned converts the request to the planner's Request.
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

// resolve resolves a request without planning it.
func (q request) resolve() (*resolved, error) {
	r, err := q.planned().Resolve()
	if err != nil {
		return nil, err
	}
	return &resolved{r, q.hooks}, nil
}

// with returns the same request with settings that are known once the data are open: the tokenizer,
// the order, and the number of steps of the configured epochs.
func (r *resolved) with(tokenizer, order string, steps int) *resolved {
	changed := *r.Resolved
	changed.Tokenizer, changed.Order, changed.Steps = tokenizer, order, steps
	return &resolved{&changed, r.hooks}
}

// beside returns the same request for a device that needs the given bytes outside the arenas.
func (r *resolved) beside(outside int64) *resolved {
	return &resolved{r.Resolved.Beside(outside), r.hooks}
}

// opener returns the opener of the folder of checkpoints.
func (h *hooks) opener() filesys.Opener {
	if h.folders != nil {
		return h.folders
	}
	return filesys.System
}
