package config

import (
	"cmp"
	"math"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/recompute"
	"github.com/spillway-ml/spillway/zero"
)

// Validate refuses values that no run could have, with an ErrConfig that names the problem. It
// reads nothing outside the Config.
func (c *Config) Validate() error {
	if err := c.validate(); err != nil {
		return OfKind(err, ErrRefused)
	}
	return nil
}

func (c *Config) validate() error {
	atLeast := func(field string, v, least int, what string) error {
		switch {
		case v < least && least == 0:
			return Refuse("Config.%s %d is negative; 0 or more %ss are possible", field, v, what)
		case v < least:
			return Refuse("Config.%s %d: at least %d %s is needed", field, v, least, what)
		case int64(v) > largest[field] && largest[field] > 0:
			return Refuse("Config.%s %d: at most %d is possible", field, v, largest[field])
		}
		return nil
	}
	finite := func(field string, v float64, least float64) error {
		if !(v >= least) || math.IsInf(v, 0) {
			return Refuse("Config.%s %g: a finite number of at least %g is needed", field, v, least)
		}
		return nil
	}
	fraction := func(field string, v float64) error {
		if !(v >= 0 && v < 1) {
			return Refuse("Config.%s %g: a number in [0, 1) is needed", field, v)
		}
		return nil
	}
	if err := c.Own.validate(c); err != nil {
		return err
	}
	if c.Model == "" && c.Own.Model == nil {
		return Refuse("Config.Model is missing: give a preset's name or a folder with a config.json")
	}
	if c.Seq < 0 {
		return Refuse("Config.Seq %d: at least 1 token is needed; 0 is the smaller of 256 and the model's positions", c.Seq)
	}
	leastSteps := 1
	if c.Epochs > 0 {
		leastSteps = 0 // Steps is computed from Epochs
	}
	checks := []error{
		atLeast("Steps", c.Steps, leastSteps, "step"), atLeast("Epochs", c.Epochs, 0, "epoch"), atLeast("Batch", c.Batch, 1, "row"), atLeast("Seq", c.Seq, 0, "token"),
		atLeast("Accum", c.Accum, 1, "micro-batch"), atLeast("Ranks", c.Ranks, 1, "rank"), atLeast("Warmup", c.Warmup, 0, "step"),
		atLeast("Threads", c.Threads, 0, "thread"), atLeast("Prefetch", c.Prefetch, 0, "unit"), atLeast("EvalEvery", c.EvalEvery, 0, "step"),
		atLeast("EvalSteps", c.EvalSteps, 1, "batch"), atLeast("SaveEvery", c.SaveEvery, 0, "step"), atLeast("Keep", c.Keep, 0, "checkpoint"), atLeast("ReceiptEvery", c.ReceiptEvery, 0, "step"),
		atLeast("LRBaseBatch", c.LRBaseBatch, 1, "row"),
		oneOf("LRSchedule", c.LRSchedule, lrSchedules), oneOf("LRScale", c.LRScale, lrScales), oneOf("Order", c.Order, orders), oneOf("AccumOrder", c.AccumOrder, accumOrders),
		oneOf("Precision", c.Precision, precisions), oneOf("BF16Rounding", c.BF16Rounding, bf16Roundings), validRounding(c), oneOf("Reduce", c.Reduce, reduces), validScale(c), validInt8(c), validStates(c), validEpilogues(c), validLoRA(c), validBase(c), atLeast("ShardSize", c.ShardSize, 0, "rank"),
		validTensor(c), validPipeline(c), atLeast("LocalRanks", c.LocalRanks, 0, "rank"), atLeast("PerHost", c.PerHost, 0, "rank"),
		oneOf("Optimizer", c.Optimizer, zero.OptimizerNames()), oneOf("Device", c.Device, devices),
		oneOf("OnNonFinite", c.OnNonFinite, nonFinites), oneOf("AsyncSave", c.AsyncSave, asyncSaves), oneOf("CUDAGraphs", c.CUDAGraphs, cudaGraphs), oneOf("Overlap", c.Overlap, overlaps),
		validCollectives(c), c.validateSchedule(),
		finite("LR", c.LR, 0), finite("MinLR", c.MinLR, 0), finite("WeightDecay", c.WeightDecay, 0), finite("Eps", c.Eps, 0), finite("Clip", c.Clip, 0), finite("Trust", c.Trust, 0),
		fraction("Beta1", c.Beta1), fraction("Beta2", c.Beta2), fraction("Dropout", c.Dropout),
	}
	for _, err := range checks {
		if err != nil {
			return err
		}
	}
	o := c.UpdateRule()
	switch err := o.Validate(); {
	case c.Trust == 0 && o.Reads(zero.Trust):
		return Refuse("Config.Trust 0: %s would train nothing; a positive number is needed", o.Name)
	case err != nil && c.Nesterov:
		return Refuse("Config.Nesterov: %w", err)
	case err != nil:
		return Refuse("Config.Optimizer: %w", err)
	}
	return cmp.Or(c.validateMemory(), c.validateFiles())
}

// validateMemory checks the fields that decide where data is stored: stage, caps, caches,
// recomputation and offload.
func (c *Config) validateMemory() error {
	if _, err := zero.ParseStage(c.Zero); err != nil {
		return Refuse("Config.Zero %d: stages are 0, 1, 2 and 3", c.Zero)
	}
	for _, s := range []struct {
		field string
		v     int64
	}{{"DeviceMemory", c.DeviceMemory}, {"HostMemory", c.HostMemory}, {"DiskCache", c.DiskCache}} {
		if s.v < 0 {
			return Refuse("Config.%s %d: a size is not negative", s.field, s.v)
		}
	}
	if f := c.FrozenCache; f.Bytes != 0 {
		switch {
		case f.Bytes < 0 || f.Tier != graph.Host && f.Tier != graph.Disk:
			return Refuse("Config.FrozenCache: %s tier of %d bytes; host or disk with a positive size is possible", f.Tier, f.Bytes)
		case len(c.Freeze) == 0 && !c.LoRA.Active():
			return Refuse("Config.FrozenCache needs Config.Freeze or Config.LoRA: the parameters that are not trained")
		case c.Dropout > 0:
			return Refuse("Config.FrozenCache %s with Config.Dropout %g: dropout has another mask each time; leave one of them out", f, c.Dropout)
		case f.Tier == graph.Disk && c.Disk == "":
			return Refuse("Config.FrozenCache %s needs Config.Disk: the folder of the disk tier", f)
		}
	}
	if _, err := recompute.Parse(c.Recompute); err != nil && !c.RecomputeAuto() {
		return Refuse("Config.Recompute %s: %w", asGiven(c.Recompute), err)
	}
	if _, err := offload.Parse(c.Offload); err != nil {
		return Refuse("Config.Offload %s: %w", asGiven(c.Offload), err)
	}
	for _, p := range c.Allow {
		if err := oneOf("Allow", p, precisions[1:]); err != nil {
			return err
		}
	}
	return nil
}

// validateFiles checks the fields about other files than the training data, and fields that need
// another field.
func (c *Config) validateFiles() error {
	if c.Timeout <= 0 {
		return Refuse("Config.Timeout %s: a positive duration is needed", c.Timeout)
	}
	return cmp.Or(c.Chat.validate(c), c.refuseIdle())
}
