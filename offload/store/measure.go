package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spillway-ml/spillway/device"
)

// Sample is what one choice of block and depth reached, in bytes per second.
type Sample struct {
	Block int     `json:"block_bytes"`
	Depth int     `json:"queue_depth"`
	Read  float64 `json:"read_bytes_per_second"`
	Write float64 `json:"write_bytes_per_second"`
}

// Sweep is what Measure tries: blocks × depths.
var sweepBlocks, sweepDepths = []int{256 << 10, 1 << 20, 4 << 20}, []int{4, 16, 32}

// measureBytes is the size of the file that is written and read, measureWindow
// the memory that it goes from and to.
const (
	measureBytes  = 256 << 20
	measureWindow = 32 << 20
)

// Measure writes and reads a file in the folder, as a training run would,
// checksums included, for each of some choices of block and depth, about as long
// as each says (for the reads and the writes of a choice each). It returns the
// samples, and of the choices within a twentieth of the best the one that takes
// the least memory.
func Measure(ctx context.Context, dir string, each time.Duration, warn func(string)) (samples []Sample, best Tuning, err error) {
	mem, err := mapPages(measureWindow)
	if err != nil {
		return nil, best, err
	}
	defer func() { err = errors.Join(err, unmapPages(mem)) }()
	for i := range mem { // not zeros, which a disk may know how to leave out
		mem[i] = byte(i*7 + i>>11)
	}
	for _, block := range sweepBlocks {
		for _, depth := range sweepDepths {
			s, err := measure(ctx, dir, Options{Block: block, Depth: depth, Warn: warn}, each, mem)
			if err != nil {
				return nil, best, err
			}
			samples = append(samples, s)
			warn = nil // once
		}
	}
	s := choose(samples)
	return samples, Tuning{Block: s.Block, Depth: s.Depth, ReadBytesPerSec: s.Read, WriteBytesPerSec: s.Write, Measured: time.Now().UTC().Truncate(time.Second)}, nil
}

// choose returns the sample of the least memory whose time for one byte read and
// one written is within a twentieth of the best.
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

func measure(ctx context.Context, dir string, o Options, each time.Duration, mem []byte) (s Sample, err error) {
	folder, err := Open(dir, o)
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, folder.Close()) }()
	file, err := folder.create(0, measureBytes, 0)
	if err != nil {
		return s, err
	}
	var stores, loads []device.Transfer
	for off := int64(0); off < measureBytes; off += measureWindow {
		stores, loads = append(stores, file.Store(mem, off)), append(loads, file.Load(mem, off))
	}
	// The first writes to preallocated space are slower than all later ones.
	if _, err := timed(ctx, stores, 0); err != nil {
		return s, err
	}
	s = Sample{Block: o.Block, Depth: o.Depth}
	if s.Write, err = timed(ctx, stores, each); err != nil {
		return s, err
	}
	s.Read, err = timed(ctx, loads, each)
	return s, err
}

// timed runs the transfers in a circle for about that long, or once, and returns
// bytes per second.
func timed(ctx context.Context, list []device.Transfer, long time.Duration) (float64, error) {
	start := time.Now()
	for i := 0; ; i++ {
		took := time.Since(start)
		if long == 0 && i == len(list) || long > 0 && took >= long && i > 0 {
			return float64(i) * measureWindow / took.Seconds(), nil
		}
		if err := ctx.Err(); err != nil {
			return 0, fmt.Errorf("measure the disk: %w", err)
		}
		if err := list[i%len(list)].Run(); err != nil {
			return 0, err
		}
	}
}
