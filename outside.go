package spillway

import (
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/plan"
)

// What a process takes of host memory outside its ranks' arenas, in bytes.
// Measured as the highest resident memory less the arenas (benchmarks/resident):
// of a program of two layers, of 100 and of 400 on one rank and on four, and
// with each of the options below.
const (
	processOutside   = 26 << 20 // code, the runtime, the heap, kernels' scratch, the chunk that states are loaded and saved by
	rankOutside      = 1 << 19  // threads, queues, groups
	opOutside        = 1600     // an operation of the program, with its buffers and their places
	boundOutside     = 1050     // an operation bound to a rank's kernels and addresses
	tokenizerOutside = 14 << 20 // tables of a byte-pair tokenizer
)

// processRanks is how many of the run's ranks share a process.
func (c *Config) processRanks() int {
	if c.LocalRanks > 0 {
		return min(c.LocalRanks, c.Ranks)
	}
	return c.Ranks
}

// outside returns what a rank's process needs of each space outside the arenas:
// what the configuration says of its device, and the rank's part of the process's
// own host memory. The CPU device's memory is host memory, but all that is
// outside counts as host.
func (c *Config) outside(p *plan.Plan) [graph.NumSpaces]int64 {
	all := c.Outside
	ranks := int64(c.processRanks())
	ops, streams := programSize(p.Program)
	process := processOutside + ranks*rankOutside + ops*(opOutside+ranks*boundOutside)
	if t := strings.ToLower(c.Tokenizer); t != "" && t != "bytes" {
		process += tokenizerOutside
	}
	if c.Trace != "" {
		process += ranks * streams * exec.TraceBytes(traceSpans)
	}
	if disk := p.Layout.Spaces[graph.Disk].Peak; disk > 0 {
		files := make([]int64, ranks)
		for i := range files {
			files[i] = disk
		}
		process += store.OutsideBytes(diskOptions(c.Disk), files...)
	}
	all[graph.Host] += (process+ranks-1)/ranks + c.DiskCache
	return all
}

// diskOptions are those that a folder of the disk tier is opened with: what was
// measured for its filesystem, or the defaults.
func diskOptions(dir string) store.Options {
	if dir == "" {
		return store.Options{}
	}
	t, err := store.LoadTuning(dir)
	if err != nil { // opening the folder warns of it
		return store.Options{}
	}
	return store.Options{Block: t.Block, Depth: t.Depth}
}

// cacheFits refuses a cache of the disk tier that is all that does not fit the
// host.
func cacheFits(c *Config, p *plan.Plan) error {
	left := c.HostMemory - p.Layout.Spaces[graph.Host].Peak - (p.Config.Outside[graph.Host] - c.DiskCache)
	if c.HostMemory > 0 && left >= 0 && c.DiskCache > left {
		return fmt.Errorf("--disk-cache %d: of --host-memory %d the plan leaves %d bytes", c.DiskCache, c.HostMemory, left)
	}
	return nil
}

// programSize counts a program's operations and the streams that they run on.
func programSize(p *graph.Program) (ops, streams int64) {
	var used [graph.NumStreams]bool
	for i := range p.Sections {
		for j := range p.Sections[i].Phases {
			ph := &p.Sections[i].Phases[j]
			ops += int64(len(ph.Ops))
			for k := range ph.Ops {
				used[ph.Ops[k].Stream] = true
			}
		}
	}
	for _, u := range used {
		if u {
			streams++
		}
	}
	return ops, streams
}
