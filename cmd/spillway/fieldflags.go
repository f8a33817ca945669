package main

import (
	"regexp"
	"strings"

	"github.com/spillway-ml/spillway"
	trainer "github.com/spillway-ml/spillway/train"
)

// flagOf are the flags of the fields that the library's errors, warnings and reasons
// name. What has none stays as it is.
var flagOf = map[string]string{
	"Config.AcceptChanges": "accept-changes", "Config.Accum": "accum", "Config.AccumOrder": "accum-order",
	"Config.AdaptAll": "adapt-all", "Config.Allow": "allow", "Config.AsyncSave": "async-save", "Config.Batch": "batch",
	"Config.Beta1": "beta1", "Config.Beta2": "beta2", "Config.CUDAGraphs": "cuda-graphs", "Config.Checkpoint": "checkpoint", "Config.Clip": "clip",
	"Config.Collectives": "collectives", "Config.Data": "data", "Config.DataGlob": "data-glob", "Config.Device": "device",
	"Config.DeviceMemory": "device-memory", "Config.Disk": "disk", "Config.DiskCache": "disk-cache",
	"Config.Dropout": "dropout", "Config.Epilogues": "epilogues", "Config.Eps": "eps", "Config.EvalData": "eval-data", "Config.EvalEvery": "eval-every",
	"Config.EvalSteps": "eval-steps", "Config.Freeze": "freeze", "Config.FrozenCache": "frozen-cache",
	"Config.GlobalBatch": "global-batch", "Config.HostMemory": "host-memory", "Config.Init": "init",
	"Config.Int8": "int8", "Config.Keep": "keep", "Config.LR": "lr", "Config.LRBaseBatch": "lr-base-batch",
	"Config.LRScale": "lr-scale", "Config.LRSchedule": "lr-schedule", "Config.LocalRanks": "ranks-per-process",
	"Config.LossScale": "loss-scale", "Config.LossScaleHysteresis": "loss-scale-hysteresis", "Config.Metrics": "metrics",
	"Config.MetricsAddr": "metrics-addr", "Config.MinLR": "min-lr", "Config.Model": "model", "Config.Offload": "offload",
	"Config.OnNonFinite": "on-nonfinite", "Config.Optimizer": "optimizer", "Config.OptimizerDType": "optimizer-dtype",
	"Config.Order": "order", "Config.Precision": "precision", "Config.Prefetch": "prefetch", "Config.Ranks": "ranks",
	"Config.Recompute": "recompute", "Config.Reduce": "reduce", "Config.Reproducible": "reproducible",
	"Config.RequirePinned": "require-pinned", "Config.Resume": "resume", "Config.SaveEvery": "save-every",
	"Config.Seed": "seed", "Config.Seq": "seq", "Config.ShardSize": "shard-size", "Config.Steps": "steps",
	"Config.StochasticRounding": "stochastic-rounding", "Config.TensorBoard": "tensorboard",
	"Config.TextField": "text-field", "Config.Threads": "threads", "Config.Timeout": "timeout",
	"Config.Tokenizer": "tokenizer", "Config.Trace": "trace", "Config.Trust": "trust", "Config.Warmup": "warmup",
	"Config.WeightDecay": "weight-decay", "Config.Zero": "zero", "Hardware.Device": "gpu",
	"Hardware.HostShare": "node-memory", "Hardware.Nodes": "nodes", "Hardware.PerNode": "gpus-per-node",
	"Job.Outlives": "min-ranks", "Job.Transport": "transport", "Options.TextField": "text-field", "Sampling.Temperature": "temperature", "Sampling.TopK": "top-k",
	"Sampling.TopP": "top-p",
}

// namedField is a field in a sentence: a word by itself, which a path or a quoted value
// is not.
var namedField = regexp.MustCompile(`(^|[\s(])((?:Config|Sampling|Hardware|Job|Options)\.[A-Z]\w*)`)

// ofAFlag is what the planner puts before what it refuses of a pattern, whose pass has the
// flag's name.
var ofAFlag = regexp.MustCompile(`^(warning: )?plan: (freeze|recompute|offload): `)

// passAfterFlag is the pass's name behind the flag that says it.
var passAfterFlag = regexp.MustCompile(`^(--(?:recompute|offload) \S+): (?:recompute|offload): `)

// withoutModel is what the library says where a model is missing; the command has a list.
const withoutModel = "--model is missing: give a preset's name"

// flagged is a text of the library with flags in place of fields.
func flagged(text string) string {
	text = namedField.ReplaceAllStringFunc(text, func(found string) string {
		at := strings.IndexAny(found, "CHJOS")
		if flag, ok := flagOf[found[at:]]; ok {
			return found[:at] + "--" + flag
		}
		return found
	})
	text = ofAFlag.ReplaceAllString(text, "$1--$2: ")
	text = passAfterFlag.ReplaceAllString(text, "$1: ")
	return strings.Replace(text, withoutModel, withoutModel+" (spillway plan --list-models; spillway-demo is small enough for any machine)", 1)
}

// flaggedAll is flagged for lines.
func flaggedAll(lines []string) []string {
	out := make([]string, len(lines))
	for i, line := range lines {
		out[i] = flagged(line)
	}
	return out
}

// reasons are a plan's reasons as the command says them.
func reasons(f *spillway.Forecast) []string { return flaggedAll(trainer.Reasons(f)) }

// argsOf are settings as words of a command line.
func argsOf(settings spillway.Settings) (args []string) {
	for _, s := range settings {
		args = append(args, "--"+flagOf[s.Field], s.Value)
	}
	return args
}

// flagText is settings as a person types them.
func flagText(settings spillway.Settings) string { return trainer.Shell(argsOf(settings)) }
