package planner

import (
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/algo"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/run"
)

// Host memory that a process needs outside its ranks' arenas, in bytes. Fitted to the peak resident
// memory minus the arenas (benchmarks/resident) of 64 runs with 1 to 8 layers on 1 to 4 ranks. The
// sum exceeds each of them by at least 1.5 MiB.
const (
	processOutside   = 43 << 19 // 16 MiB of the program's pages, the runtime, kernels' scratch
	chunksOutside    = 3        // number of chunks through which states are drawn, checked and hashed
	rankOutside      = 1 << 18  // per rank: threads, queues, groups
	boundOutside     = 3200     // per operation and rank: buffers, kernels and addresses
	diskOutside      = 5 << 18  // per process with a disk tier, besides its buffers
	savingOutside    = 3 << 19  // per process: code that saves checkpoints, and their headers
	tokenizerOutside = 14 << 20 // tables of a byte-pair tokenizer
	traceOutside     = 1 << 20  // per process with a trace: code and buffers that write it
	traceGarbage     = 3        // bytes of the heap per recorded byte of a trace, while it is written
)

// TraceSpans is the largest number of operations of a stream that a trace holds; further ones are
// only counted.
const TraceSpans = 1 << 16

// spans returns the largest number of operations of each stream that a trace of the run records.
// They are those of sections that run once, in every step, or in every batch of an evaluation. It
// is not known how often a run generates, so generation counts as TraceSpans times.
func spans(c *config.Config, p *graph.Program) (n [graph.NumStreams]int64) {
	evaluations := 1
	if c.EvalEvery > 0 {
		evaluations += c.Steps / c.EvalEvery
	}
	for sec, ph := range p.Phases() {
		times := int64(ph.Repeat)
		switch sec.Kind {
		case graph.SectionStep:
			times *= int64(c.Steps)
		case graph.SectionEval:
			times *= int64(min(evaluations, TraceSpans)) * int64(min(c.EvalSteps, TraceSpans))
		case graph.SectionGenerate:
			times = TraceSpans
		}
		for i := range ph.Ops {
			at := &n[ph.Ops[i].Stream]
			*at += min(times, TraceSpans-*at)
		}
	}
	return n
}

// processRanks returns the number of the run's ranks that share a process.
func processRanks(c *config.Config) int {
	if c.LocalRanks > 0 {
		return min(c.LocalRanks, c.Ranks)
	}
	return c.Ranks
}

// outside returns the bytes, by space, that a rank needs outside the arenas: p.Config.Outside for
// its device and caches, and its part of the process's host memory, including the disk tier's
// buffers. The CPU device's memory is host memory, but this part always counts as host.
func outside(c *config.Config, p *plan.Plan) [graph.NumSpaces]int64 {
	all := p.Config.Outside
	ranks := int64(processRanks(c))
	program := p.Largest(graph.Device).Program
	ops := programSize(program)
	process := processOutside + chunksOutside*run.ChunkBytes(p.Program) + ranks*(rankOutside+ops*boundOutside)
	if t := strings.ToLower(c.Tokenizer); t != "" && t != "bytes" {
		process += tokenizerOutside
	}
	job := c.Processes()
	if a := c.Algorithm(); a != algo.Auto && a != algo.Direct || job != nil {
		process += ranks * algo.ScratchBytes
	}
	if job != nil {
		transport, copies := job.Outside(int(ranks))
		process += transport
		if copies {
			process += ranks * stagingBytes(p.Program)
		}
	}
	if c.Trace != "" {
		process += traceOutside
		for _, n := range spans(c, program) {
			process += ranks * exec.TraceBytes(int(n)) * traceGarbage
		}
	}
	if disk := p.Layout.Spaces[graph.Disk].Peak; disk > 0 {
		files := make([]int64, ranks)
		for i := range files {
			files[i] = disk
		}
		process += diskOutside + store.OutsideBytes(DiskOptions(c), files...)
	}
	all[graph.Host] += (process+ranks-1)/ranks + c.DiskCache
	return all
}

// DiskOptions returns the options with which the disk tier's folder is opened.
func DiskOptions(c *config.Config) store.Options {
	return store.Options{Block: c.DiskTuning.Block, Depth: c.DiskTuning.Depth}
}

// caches returns the bytes of a space that the configuration gives to caches outside the arena.
func caches(c *config.Config, sp graph.Space) (disk, frozen int64) {
	if sp == graph.Host {
		disk = c.DiskCache
	}
	if c.FrozenCache.Bytes > 0 && c.FrozenCache.Tier == sp {
		frozen = c.FrozenCache.Bytes
	}
	return disk, frozen
}

// mostOutside names the largest part of the n bytes outside a space's arena. staging is the part
// that holds a copy of a rank's states.
func mostOutside(c *config.Config, sp graph.Space, n, staging int64) string {
	disk, frozen := caches(c, sp)
	switch rest := n - disk - frozen; {
	case frozen > max(disk, rest):
		return fmt.Sprintf("Config.FrozenCache of %s", plan.Bytes(frozen))
	case staging > (n-staging)/2:
		return fmt.Sprintf("Config.AsyncSave on, which holds a copy of a rank's states, %s", plan.Bytes(staging))
	case disk > rest:
		return fmt.Sprintf("Config.DiskCache of %s", plan.Bytes(disk))
	}
	return "what the process itself needs"
}

// smallerCaches describes smaller caches with which a plan would fit; "" if smaller caches are not
// enough. A rank's caches come after the needs of its plan and process.
func smallerCaches(c *config.Config, p *plan.Plan) string {
	var texts []string
	for sp := range graph.NumSpaces {
		limit := p.Config.Capacity[sp]
		need := p.Layout.Spaces[sp].Peak + p.Config.Outside[sp]
		if limit == 0 || need <= limit {
			continue
		}
		disk, frozen := caches(c, sp)
		left := limit - (need - disk - frozen)
		if left < 0 {
			return ""
		}
		toDisk := func(room int64) string {
			if text := sizeBelow(room); text != "" {
				return fmt.Sprintf("Config.DiskCache %s or less instead of %s", text, plan.Bytes(disk))
			}
			return fmt.Sprintf("no Config.DiskCache (it is %s)", plan.Bytes(disk))
		}
		toFrozen := func(room int64) string {
			row := int64(1)
			if b := p.Program.Port(graph.PortPrefix); b != graph.NoBuf {
				row = p.Program.Buf(b).Bytes() / int64(c.Batch)
			}
			if text := sizeBelow(room); text != "" && room*int64(c.Ranks) >= row {
				return fmt.Sprintf("Config.FrozenCache %s:%s or less instead of %s", sp, text, plan.Bytes(frozen))
			}
			return fmt.Sprintf("no Config.FrozenCache (it is %s)", plan.Bytes(frozen))
		}
		switch {
		case frozen == 0:
			texts = append(texts, toDisk(left))
		case disk == 0:
			texts = append(texts, toFrozen(left))
		case frozen <= left: // the cache that skips a forward stays
			texts = append(texts, toDisk(left-frozen))
		case disk <= left:
			texts = append(texts, toFrozen(left-disk))
		default:
			texts = append(texts, fmt.Sprintf("Config.DiskCache and Config.FrozenCache of %s together", plan.Bytes(left)))
		}
	}
	return strings.Join(texts, " and ")
}

// sizeBelow formats a size as flags accept it, rounded down by less than a sixteenth; "" if it is
// not positive.
func sizeBelow(n int64) string {
	for _, u := range []struct {
		name  string
		bytes int64
	}{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}} {
		if n >= u.bytes && (n >= 16*u.bytes || n%u.bytes == 0) {
			return fmt.Sprintf("%d%s", n/u.bytes, u.name)
		}
	}
	if n <= 0 {
		return ""
	}
	return fmt.Sprint(n)
}

// programSize counts a program's operations.
func programSize(p *graph.Program) (ops int64) {
	for _, ph := range p.Phases() {
		ops += int64(len(ph.Ops))
	}
	return ops
}

// stagingBytes returns the largest host memory of a rank, outside its arena, that receives parts of
// other ranks for addition if ranks share no memory: two chunks from each.
func stagingBytes(p *graph.Program) (most int64) {
	for i := range p.Sections {
		for j := range p.Sections[i].Phases {
			for k := range p.Sections[i].Phases[j].Ops {
				op := &p.Sections[i].Phases[j].Ops[k]
				id := graph.NoBuf
				switch op.Kind {
				case graph.ReduceScatter:
					id = op.In[0]
				case graph.AllReduce:
					id = op.Out[0].Buf
				default:
					continue
				}
				n := int64(p.WorldSize())
				if axis := op.Attr.(graph.GroupAttr).Axis; axis >= 0 {
					n = int64(p.Mesh[axis].Size)
				}
				if n > 1 {
					most = max(most, 2*min(n*comm.ChunkBytes, p.Buf(id).Bytes()))
				}
			}
		}
	}
	return most
}
