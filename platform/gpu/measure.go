package gpu

import (
	"errors"
	"fmt"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/peers"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
	kernelscuda "github.com/spillway-ml/spillway/kernels/cuda"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/platform"
)

// lateKernels are the CPU kernels of a GPU's library. Start sets them, because the library may be
// opened before the pool on which they run exists.
type lateKernels struct{ kernels.Library }

// openKernels opens a GPU's library of kernels, unless it is open. It must run on the GPU's thread.
func (c *cudaPlatform) openKernels(k *card) (err error) {
	if k.lib == nil {
		k.lib, err = c.parts.Kernels(c.o, c.api, k.gpu, &c.cpu)
	}
	return err
}

// rehearser is a library that can load a program's operations in advance, so that their device
// memory can be measured.
type rehearser interface {
	Rehearse(r kernelscuda.Rehearsal, s driver.Stream) (inGraphs int64, err error)
}

var _ rehearser = (*compiledKernels)(nil) // otherwise nothing would be measured

// arenaUnit is the granularity of the driver's device memory, in bytes: an arena may take up to
// arenaUnit − 1 bytes more than its size.
const arenaUnit = 2 << 20

// mappedPeer is the memory, in bytes, that a rank reserves for page tables that map another
// GPU's memory. They grow with that GPU's arenas: 8 or 16 bytes for each page of 2 MiB.
const mappedPeer = arenaUnit

// Measure loads and runs each operation of a plan once on each GPU, before arenas exist. It then
// reads the free memory, so that the memory outside the arenas is measured and the arenas fit. A
// value that the caller gave for Outside is kept.
func (c *cudaPlatform) Measure(p *plan.Plan) error {
	for _, k := range c.cards {
		err := k.do(func() error { return c.measure(k, p) })
		if _, missing := errors.AsType[*platform.MissingDevice](err); missing {
			return err
		}
		if err != nil {
			return fmt.Errorf("Config.Device cuda: GPU %d: %w", k.gpu.Ordinal, err)
		}
	}
	c.limit(peers.ScratchBytes(p.Program, c.gpusOf()))
	return nil
}

func (c *cudaPlatform) measure(k *card, p *plan.Plan) error {
	if err := c.openKernels(k); err != nil {
		return err
	}
	lib, ok := k.lib.(rehearser)
	if !ok {
		return nil // a test's kernels, which need no device memory
	}
	inGraphs, err := c.rehearse(k, lib, p)
	if err != nil {
		return fmt.Errorf("load the kernels and products of the plan: %w", err)
	}
	free, _, err := c.api.MemInfo()
	if err != nil {
		return err
	}
	ranks := int64(len(k.ranks))
	k.outside = (max(k.available-free, 0)+inGraphs+ranks-1)/ranks + arenaUnit
	return nil
}

func (c *cudaPlatform) rehearse(k *card, lib rehearser, p *plan.Plan) (inGraphs int64, err error) {
	r := kernelscuda.Rehearsal{Program: p.Program, Offset: p.Layout.Offset, Sums: c.o.World.Size > 1, Graphs: c.o.Graphs}
	for s := range graph.NumSpaces {
		r.Size[s] = p.Layout.Spaces[s].Peak
	}
	for _, rank := range k.ranks {
		r.Coords = append(r.Coords, comm.Coord(p.Program.Mesh, rank))
	}
	// Create as many streams as the ranks will have, including those for copies from other
	// GPUs: the driver keeps memory for each.
	var streams []driver.Stream
	for range len(r.Coords) * (int(graph.NumStreams) + 1) {
		var s driver.Stream
		if s, err = c.api.NewStream(); err != nil {
			break
		}
		streams = append(streams, s)
	}
	if err == nil {
		inGraphs, err = lib.Rehearse(r, streams[0])
	}
	for _, s := range streams {
		err = errors.Join(err, c.api.DestroyStream(s))
	}
	return inGraphs, err
}
