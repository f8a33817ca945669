package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/internal/filesys"
)

// Sample is the measured speed with one choice of block and depth, in bytes per second.
type Sample struct {
	Block int     `json:"block_bytes"`
	Depth int     `json:"queue_depth"`
	Read  float64 `json:"read_bytes_per_second"`
	Write float64 `json:"write_bytes_per_second"`
}

// Measure tries all blocks × depths whose buffers take at most sweepMemory, because a run needs
// that memory in addition to its plan.
var sweepBlocks, sweepDepths = []int{256 << 10, 1 << 20, 4 << 20}, []int{4, 8, 16, 32}

const sweepMemory = 32 << 20

// Effort limits what Measure does. The zero value takes some 8 seconds.
type Effort struct {
	// Bytes is the size of the file that is written and read; 0: 256 MiB.
	Bytes int64
	// Each is the duration of the reads, and of the writes, of one choice; 0: 200 ms.
	Each time.Duration
}

// maxWindow is the largest size in bytes of the memory that is written and read.
const maxWindow = 32 << 20

// Measure writes and reads a file in the folder as a training run would, checksums included, with
// several choices of block and depth. It returns the samples and, among the choices within 5 % of
// the fastest, the one that takes the least memory.
func Measure(ctx context.Context, dir string, e Effort, warn func(string)) (samples []Sample, best Tuning, err error) {
	if e.Bytes <= 0 {
		e.Bytes = 256 << 20
	}
	if e.Each <= 0 {
		e.Each = 200 * time.Millisecond
	}
	mem, err := filesys.MapPages(min(maxWindow, e.Bytes))
	if err != nil {
		return nil, best, err
	}
	defer func() { err = errors.Join(err, filesys.UnmapPages(mem)) }()
	for i := range mem { // not all zeros, which some disks do not store
		mem[i] = byte(i*7 + i>>11)
	}
	for _, block := range sweepBlocks {
		for _, depth := range sweepDepths {
			if block*depth > sweepMemory {
				continue
			}
			s, err := measure(ctx, dir, Options{Block: block, Depth: depth, Warn: warn}, e, mem)
			if err != nil {
				return nil, best, err
			}
			samples = append(samples, s)
			warn = nil // warn only once
		}
	}
	s := choose(samples)
	return samples, Tuning{Block: s.Block, Depth: s.Depth, ReadBytesPerSec: s.Read, WriteBytesPerSec: s.Write, Measured: time.Now().UTC().Truncate(time.Second)}, nil
}

// choose returns the sample with the least memory among those whose time to read and write one
// byte is within 5 % of the best.
func choose(samples []Sample) Sample {
	speed := func(s Sample) float64 {
		if s.Read <= 0 || s.Write <= 0 {
			return 0
		}
		return 1 / (1/s.Read + 1/s.Write)
	}
	best := samples[0]
	for _, s := range samples {
		if speed(s) > speed(best) {
			best = s
		}
	}
	got := best
	for _, s := range samples {
		if memory := s.Block * s.Depth; speed(s) >= 0.95*speed(best) && memory < got.Block*got.Depth {
			got = s
		}
	}
	return got
}

func measure(ctx context.Context, dir string, o Options, e Effort, mem []byte) (s Sample, err error) {
	folder, err := Open(dir, o)
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, folder.Close()) }()
	file, err := folder.create(0, e.Bytes, 0, 0)
	if err != nil {
		return s, err
	}
	var stores, loads []device.Transfer
	window := int64(len(mem))
	for off := int64(0); off+window <= e.Bytes; off += window {
		stores, loads = append(stores, file.Store(mem, off)), append(loads, file.Load(mem, off))
	}
	// The first write to preallocated space is slower than all later ones, so it is not timed.
	if _, err := timed(ctx, stores, window, 0); err != nil {
		return s, err
	}
	s = Sample{Block: o.Block, Depth: o.Depth}
	if s.Write, err = timed(ctx, stores, window, e.Each); err != nil {
		return s, err
	}
	s.Read, err = timed(ctx, loads, window, e.Each)
	return s, err
}

// timed runs the transfers, of the given size in bytes each, in a circle for about the given
// time, or each once if that is 0. It returns bytes per second.
func timed(ctx context.Context, list []device.Transfer, bytes int64, long time.Duration) (float64, error) {
	start := time.Now()
	for i := 0; ; i++ {
		took := time.Since(start)
		if long == 0 && i == len(list) || long > 0 && took >= long && i > 0 {
			return float64(i) * float64(bytes) / took.Seconds(), nil
		}
		if err := ctx.Err(); err != nil {
			return 0, fmt.Errorf("measure the disk: %w", err)
		}
		if err := list[i%len(list)].Run(); err != nil {
			return 0, err
		}
	}
}
