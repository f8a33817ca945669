// Package inproc is communication between the ranks of one process: each rank
// reads its peers' arenas directly, so that every byte of a collective is read
// once and written once.
package inproc

import (
	"fmt"
	"time"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/meet"
	"github.com/spillway-ml/spillway/graph"
)

// Options of a World.
type Options struct {
	// Timeout is how long a rank waits in an operation for another one to
	// arrive. Default 60 s.
	Timeout time.Duration
}

// World is the ranks of a job in this process.
type World struct{ *meet.World }

// New returns the world of the mesh's ranks. An empty mesh has one rank.
func New(mesh []graph.Axis, o Options) (*World, error) {
	w, err := meet.New("inproc", mesh, o.Timeout, func(m *meet.Member) meet.Binder { return &member{Member: m} })
	if err != nil {
		return nil, err
	}
	return &World{w}, nil
}

// Group returns rank's membership along a mesh axis, −1 for all ranks.
func (w *World) Group(rank, axis int) (comm.Group, error) {
	all, err := w.Members(rank)
	if err != nil {
		return nil, err
	}
	if axis < -1 || axis >= len(all)-1 {
		return nil, fmt.Errorf("inproc: mesh axis %d of %d axes", axis, len(all)-1)
	}
	return all[axis+1], nil
}

// Groups returns all of rank's memberships by mesh axis, −1 for all ranks.
func (w *World) Groups(rank int) (map[int]comm.Group, error) {
	all, err := w.Members(rank)
	groups := map[int]comm.Group{}
	for slot, m := range all {
		groups[slot-1] = m
	}
	return groups, err
}
