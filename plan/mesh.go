package plan

import (
	"fmt"
	"slices"

	"github.com/dustin/go-humanize/english"

	"github.com/spillway-ml/spillway/fsdp"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/nearest"
	"github.com/spillway-ml/spillway/mesh"
	"github.com/spillway-ml/spillway/precision"
)

func (c Config) validateMesh() error {
	switch {
	case c.Precision < precision.FP32 || c.Precision > precision.FP16:
		return fmt.Errorf("precision: %v does not exist; use fp32, bf16 or fp16", c.Precision)
	case c.Reduce32 && c.Precision == precision.FP32:
		return fmt.Errorf("reduce fp32: in fp32 gradients travel in fp32 already; leave it out, or compute in bf16 or fp16")
	case c.Tensor < 0 || c.Pipeline < 0:
		return fmt.Errorf("Config.Tensor %d, Config.Pipeline %d: negative", c.Tensor, c.Pipeline)
	case c.Ranks%(max(c.Tensor, 1)*max(c.Pipeline, 1)) != 0:
		return c.unequalGroups()
	case c.Slices < 0 || c.Slices&(c.Slices-1) != 0 || c.Slices == 1 || c.Slices%max(c.Tensor, 1) != 0 || c.Tensor > 1 && c.Slices == 0:
		return fmt.Errorf("Config.TensorSlices %d with Config.Tensor %d: want a power of two from 2 that the ranks divide", c.Slices, max(c.Tensor, 1))
	case c.Pipeline > 1 && c.Stages != nil && len(c.Stages) != c.Pipeline:
		return fmt.Errorf("Config.Pipeline %d with stages that begin at layers %v: each has a first layer", c.Pipeline, c.Stages)
	case c.Pipeline > 1 && c.Stage.ShardsGrads():
		return fmt.Errorf("Config.Pipeline with Config.Zero %d: not built; give stage 0 or 1", c.Stage)
	case c.Pipeline > 1 && (c.LayerOrder || c.CachePrefix || c.Noise || len(c.Shapes) > 1):
		return fmt.Errorf("Config.Pipeline beside layer order %v, a cache of frozen layers %v, "+
			"the gradient noise scale %v or steps of %d sizes: not built", c.LayerOrder, c.CachePrefix, c.Noise, max(len(c.Shapes), 1))
	case (c.Slices > 0 || c.Pipeline > 1) && c.uneven() != nil:
		field, beside := "Config.GlobalBatch", "Config.Tensor"
		if len(c.Shapes) > 0 {
			field = "Config.BatchSchedule"
		}
		if c.Pipeline > 1 {
			beside = "Config.Pipeline"
		}
		return fmt.Errorf("%s with %s: uneven shares %v of ranks are not built; give rows that %d ranks share evenly", field, beside, c.uneven(), c.DataRanks())
	case c.ShardSize < 0:
		return fmt.Errorf("shard size: %d is negative; 0 shards over all ranks", c.ShardSize)
	case c.ShardSize > 0 && c.DataRanks()%c.ShardSize != 0:
		return c.unequalShards()
	case c.Shares != nil && !c.Reproducible:
		return fmt.Errorf("shares %v of ranks need Config.Reproducible", c.Shares)
	case c.Reproducible && c.ShardSize > 0 && c.ShardSize < c.DataRanks():
		return fmt.Errorf("Config.Reproducible with Config.ShardSize %d of %d ranks: sums within groups of ranks and then over the groups have another order at each number of ranks; shard over all of them", c.ShardSize, c.Ranks)
	}
	return nil
}

// unequalGroups returns the error for ranks that do not divide into tensor groups and stages. It
// proposes no value for Config.Ranks: in a job that is the number of processes or GPUs.
func (c Config) unequalGroups() error {
	each, given := max(c.Tensor, 1)*max(c.Pipeline, 1), english.WordSeries(c.given(), "and")
	return fmt.Errorf("%s with Config.Ranks %d: the number of ranks has to be a multiple of %d", given, c.Ranks, each)
}

// unequalShards returns the error for data ranks that do not divide into groups of ShardSize.
func (c Config) unequalShards() error {
	n, beside := c.DataRanks(), english.WordSeries(append(c.given(), fmt.Sprintf("Config.Ranks %d", c.Ranks)), "and")
	instead := "leave it out"
	if n > 1 {
		instead = "use " + nearest.Divisors(n, c.ShardSize)
	}
	return fmt.Errorf("Config.ShardSize %d with %s: states are sharded over %s, and %d does not divide %d; %s",
		c.ShardSize, beside, english.Plural(n, "rank", ""), c.ShardSize, n, instead)
}

// given lists the fields that reduce the number of data ranks.
func (c Config) given() (list []string) {
	if c.Tensor > 1 {
		list = append(list, fmt.Sprintf("Config.Tensor %d", c.Tensor))
	}
	if c.Pipeline > 1 {
		list = append(list, fmt.Sprintf("Config.Pipeline %d", c.Pipeline))
	}
	return list
}

// uneven returns the ranks' shares of a step's micro-batches if they differ; nil if all are equal.
func (c Config) uneven() []int {
	for _, s := range c.Shapes {
		if s.Shares != nil {
			return s.Shares
		}
	}
	return c.Shares
}

// DataRanks returns the degree of data parallelism: the number of ranks, or groups of ranks, with
// different rows.
func (c Config) DataRanks() int { return c.Ranks / max(c.Tensor, 1) / max(c.Pipeline, 1) }

// shardSize returns the number of ranks along the shard axis.
func (c Config) shardSize() int {
	if c.ShardSize == 0 {
		return c.DataRanks()
	}
	return c.ShardSize
}

// mesh returns the axes: pipeline stages, replicas, shards, tensor ranks; only the shard axis is
// always there. Tensor ranks come last, so that they are neighbours. Pipeline stages come first:
// they send the least data, so they may be on different servers.
func (c Config) mesh() (axes []graph.Axis) {
	if c.Pipeline > 1 {
		axes = append(axes, graph.Axis{Name: graph.PipelineAxis, Size: c.Pipeline})
	}
	if c.ShardSize > 0 {
		axes = append(axes, graph.Axis{Name: "replicate", Size: c.DataRanks() / c.ShardSize})
	}
	axes = append(axes, graph.Axis{Name: shardAxis, Size: c.shardSize()})
	if c.Tensor > 1 {
		axes = append(axes, graph.Axis{Name: graph.TensorAxis, Size: c.Tensor})
	}
	return axes
}

const shardAxis = "shard"

// axis returns the index of a mesh axis, −1 if there is none.
func (c Config) axis(name string) int {
	return slices.IndexFunc(c.mesh(), func(a graph.Axis) bool { return a.Name == name })
}

// cutTensors divides the computation over the ranks of the tensor axis.
func cutTensors(p *graph.Program, s *Spec) (*graph.Program, error) {
	if s.Slices == 0 {
		return p, nil
	}
	q := *p
	q.Mesh = s.mesh()
	cut, err := mesh.Tensor(&q, mesh.Options{Axis: s.axis(graph.TensorAxis), Slices: s.Slices, Rows: true})
	if err != nil {
		return nil, s.uncut(&q, err)
	}
	return cut, nil
}

// uncut returns the error for a program that cannot be cut into Slices slices. It names the largest
// possible number.
func (c Config) uncut(p *graph.Program, why error) error {
	field, all := "Config.Tensor", "Config.Tensor"
	if c.Slices != c.Tensor {
		field, all = "Config.TensorSlices", "Config.TensorSlices"
		if c.Tensor > 1 {
			all = "Config.Tensor and " + all
		}
	}
	for n := c.Slices / 2; n > 1; n /= 2 {
		if _, err := mesh.Tensor(p, mesh.Options{Axis: -1, Slices: n}); err == nil {
			return fmt.Errorf("%s %d: %w; at most %d is possible", field, c.Slices, why, n)
		}
	}
	return fmt.Errorf("%s %d: %w; no number is possible with this model; leave %s out", field, c.Slices, why, all)
}

// intoStages divides the blocks over the stages of a pipeline.
func intoStages(p *graph.Program, s *Spec) (*graph.Program, error) {
	if s.Pipeline < 2 {
		return p, nil
	}
	q := *p
	q.Mesh = s.mesh()
	cut, err := mesh.Pipeline(&q, s.axis(graph.PipelineAxis), s.Stages)
	if err != nil {
		return nil, fmt.Errorf("Config.Pipeline %d: %w; leave it out", s.Pipeline, err)
	}
	return cut, nil
}

func (c Config) shardOptions() fsdp.Options {
	return fsdp.Options{Stage: c.Stage, Axis: c.axis(shardAxis), Accum: c.Accum, Shares: c.Shares, Shapes: c.Shapes, InLayers: c.inLayers(), Reproducible: c.Reproducible, Noise: c.Noise,
		Prefetch: c.Prefetch, Optimizer: c.Optimizer, Clip: c.Clip, Reduce32: c.Reduce32,
		Int8Gather: c.Int8Gather, Int8Reduce: c.Int8Reduce, Base: c.Base}
}

// noise reports whether the squares of a step's leaves are summed, for the gradient noise scale.
func (c Config) noise() bool { return c.Noise && c.Reproducible && c.Accum*c.DataRanks() > 1 }

func (c Config) castOptions() precision.Options {
	return precision.Options{Precision: c.Precision, Grads32: fsdp.Grads32(c.shardOptions(), c.shardSize())}
}
