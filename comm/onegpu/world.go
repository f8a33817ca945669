// Package onegpu is communication between ranks of one process that share a GPU:
// copies, and sums in the tree's order, straight from the peers' arenas. No byte
// leaves the device.
package onegpu

import (
	"errors"
	"fmt"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/meet"
	"github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

// DefaultTimeout is how long an operation waits for its peers.
const DefaultTimeout = meet.DefaultTimeout

// Sum adds buffers of the ranks in the order of comm.Adder, or from left to right:
// kernels/cuda has it.
type Sum interface {
	// Enqueue adds the sum of n elements at srcs, one for each rank, to a stream. It
	// goes to every one of dsts, or is added to what is there. A dst may be one of
	// the srcs. It does not allocate.
	Enqueue(api driver.API, s driver.Stream, dsts, srcs []driver.Address, n int64, accumulate bool) error
}

// Options of a World.
type Options struct {
	// Timeout is how long a rank waits in an operation for another one to
	// arrive. Default 60 s.
	Timeout time.Duration
	// Sum makes a sum of elements, for one rank. From left to right it is of f32.
	Sum func(dtype graph.DType, order graph.SumOrder) (Sum, error)
}

// World is the ranks of a job on one GPU.
type World struct{ *meet.World }

// New returns the world of the mesh's ranks; an empty mesh has one.
func New(mesh []graph.Axis, o Options) (*World, error) {
	if o.Sum == nil {
		return nil, errors.New("onegpu: want sums")
	}
	w, err := meet.New("onegpu", mesh, o.Timeout, func(m *meet.Member) meet.Binder { return &member{Member: m, newSum: o.Sum} })
	if err != nil {
		return nil, err
	}
	return &World{w}, nil
}

// Groups returns all of a rank's memberships by mesh axis, −1 for all ranks. ctx
// is the rank's context, on whose goroutine this and the groups' methods are
// called.
func (w *World) Groups(ctx *cuda.Context) (map[int]comm.Group, error) {
	rank := ctx.Rank()
	all, err := meet.AllAt(w.World, rank)
	if err != nil {
		return nil, err
	}
	groups := make(map[int]comm.Group, len(all))
	for axis := -1; axis < len(all)-1; axis++ {
		m := all[axis].Own(all[axis].Rank()).(*member)
		if m.ctx != nil {
			return nil, fmt.Errorf("onegpu: rank %d has its groups already", rank)
		}
		m.ctx = ctx
		for _, e := range []*driver.Event{&m.ready, &m.done} {
			if *e, err = ctx.DriverEvent(); err != nil {
				return nil, fmt.Errorf("onegpu: %w", err)
			}
		}
		if err := m.watch(); err != nil {
			return nil, fmt.Errorf("onegpu: %w", err)
		}
		groups[axis] = m.Member
	}
	return groups, nil
}
