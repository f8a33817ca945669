package plan

import (
	"fmt"

	"github.com/spillway-ml/spillway/fsdp"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/nearest"
	"github.com/spillway-ml/spillway/precision"
)

func (c Config) validateMesh() error {
	switch {
	case c.Precision < precision.FP32 || c.Precision > precision.FP16:
		return fmt.Errorf("precision: %v does not exist; use fp32, bf16 or fp16", c.Precision)
	case c.Reduce32 && c.Precision == precision.FP32:
		return fmt.Errorf("reduce: fp32 gradients travel in fp32 already; leave it out, or compute in bf16 or fp16")
	case c.ShardSize < 0:
		return fmt.Errorf("shard size: %d is negative; 0 shards over all ranks", c.ShardSize)
	case c.ShardSize > 0 && (c.ShardSize > c.Ranks || c.Ranks%c.ShardSize != 0):
		return fmt.Errorf("Config.ShardSize: %d ranks do not split into groups of %d; use %s", c.Ranks, c.ShardSize, nearest.Divisors(c.Ranks, c.ShardSize))
	case c.Shares != nil && !c.Reproducible:
		return fmt.Errorf("shares %v of ranks need Config.Reproducible", c.Shares)
	case c.Reproducible && c.ShardSize > 0 && c.ShardSize < c.Ranks:
		return fmt.Errorf("Config.Reproducible with Config.ShardSize %d of %d ranks: sums within groups of ranks and then over the groups have another order at each number of ranks; shard over all of them", c.ShardSize, c.Ranks)
	}
	return nil
}

// mesh returns one axis of all ranks or, with a shard size, an axis of replicas and one of
// shards.
func (c Config) mesh() []graph.Axis {
	if c.ShardSize == 0 {
		return []graph.Axis{{Name: "shard", Size: c.Ranks}}
	}
	return []graph.Axis{{Name: "replicate", Size: c.Ranks / c.ShardSize}, {Name: "shard", Size: c.ShardSize}}
}

func (c Config) shardOptions() fsdp.Options {
	return fsdp.Options{Stage: c.Stage, Axis: len(c.mesh()) - 1, Accum: c.Accum, Shares: c.Shares, Shapes: c.Shapes, InLayers: c.inLayers(), Reproducible: c.Reproducible, Noise: c.Noise,
		Prefetch: c.Prefetch, Optimizer: c.Optimizer, Clip: c.Clip, Reduce32: c.Reduce32,
		Int8Gather: c.Int8Gather, Int8Reduce: c.Int8Reduce, Base: c.Base}
}

// noise says whether the squares of a step's leaves are summed, for the gradient noise scale.
func (c Config) noise() bool { return c.Noise && c.Reproducible && c.Accum*c.Ranks > 1 }

func (c Config) castOptions() precision.Options {
	m := c.mesh()
	return precision.Options{Precision: c.Precision, Grads32: fsdp.Grads32(c.shardOptions(), m[len(m)-1].Size)}
}
