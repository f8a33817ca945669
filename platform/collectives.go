package platform

import (
	"fmt"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/algo"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
)

func isPower(n int) bool { return n > 0 && n&(n-1) == 0 }

// checkCollectives refuses an algorithm that does not suit the job's hosts.
func (s *Setup) checkCollectives(ranks int) error {
	if s.Collectives != algo.Hierarchical || isPower(s.PerHost) && ranks%s.PerHost == 0 {
		return nil
	}
	has := fmt.Sprintf("%d of %d ranks on a host", s.PerHost, ranks)
	if s.PerHost == 0 {
		has = "hosts that differ, or of which nobody says what they have"
	}
	return fmt.Errorf("Config.Collectives %s: needs hosts with a power of two of neighbouring ranks each, without which its sums would have another order; here are %s; leave it out", s.Collectives, has)
}

// wrap makes a rank's groups use the configured algorithm. With auto, if ranks can access each
// other's memory, the transport's own algorithm is used, since it moves each byte once.
func (c *cpuPlatform) wrap(rank int, opt cpu.Options, groups map[int]comm.Group) error {
	o := algo.Options{Algorithm: c.setup.Collectives}
	if o.Algorithm == "" {
		o.Algorithm = algo.Auto
	}
	if c.joined != nil && opt.Map == nil {
		o.Link, o.Table = algo.Cluster, c.setup.Fastest
	}
	if o.Algorithm == algo.Direct || o.Algorithm == algo.Auto && o.Link == (algo.Link{}) || c.o.World.Size == 1 {
		return nil
	}
	memory := cpu.New(rank, cpu.Options{Map: opt.Map})
	c.scratch = append(c.scratch, memory)
	arena, err := memory.Alloc(graph.Device, algo.ScratchBytes)
	if err != nil {
		return fmt.Errorf("Config.Collectives %s: scratch memory: %w", o.Algorithm, err)
	}
	o.Scratch = device.Ptr{Arena: arena, Len: algo.ScratchBytes}
	stride := 1
	mesh := c.setup.Plan.Program.Mesh
	strides := map[int]int{-1: 1}
	for axis := len(mesh) - 1; axis >= 0; axis-- {
		strides[axis] = stride
		stride *= mesh[axis].Size
	}
	for axis, g := range groups {
		o.PerHost = perHost(c.setup.PerHost, strides[axis], g.Size())
		if groups[axis], err = algo.Wrap(g, o); err != nil {
			return err
		}
	}
	return nil
}

// perHost returns the number of a group's members that share a host, for size ranks with the given
// stride and ranks on a host. The result is a power of two that divides size, or 1.
func perHost(ranks, stride, size int) int {
	if ranks == 0 || ranks%stride != 0 {
		return 1
	}
	n := min(ranks/stride, size)
	if !isPower(n) || size%n != 0 {
		return 1
	}
	return n
}
