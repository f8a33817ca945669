package config

import (
	"fmt"
	"strings"

	"github.com/dustin/go-humanize/english"

	"github.com/spillway-ml/spillway/mesh"
	"github.com/spillway-ml/spillway/zero"
)

// A pair is a field that has an effect only together with another one. A field at its default
// is always accepted, also in a settings file.
type pair struct {
	field string               // start of the sentence, with %v for the value
	value func(c *Config) any  // value of the field
	rest  any                  // the default, which is always accepted
	means func(c *Config) bool // whether the field has an effect
	why   string               // the rest of the sentence
}

func (p *pair) idle(c *Config) bool { return p.value(c) != p.rest && !p.means(c) }

func (p *pair) sentence(c *Config) string {
	field := p.field
	if strings.Contains(field, "%") {
		field = fmt.Sprintf(field, p.value(c))
	}
	return field + " " + p.why
}

var standard = Default()

var overlaps = []string{"", "on", "off"}

// Serial says whether collectives and computation run in turn.
func (c *Config) Serial() bool { return strings.EqualFold(c.Overlap, "off") }

// refusedAlone are fields that are errors if they have no effect, since the run would not do
// what they ask for.
var refusedAlone = []pair{
	{"Config.Overlap", func(c *Config) any { return c.Serial() }, false, func(c *Config) bool { return !strings.EqualFold(c.Device, "cuda") }, "off with Config.Device cuda: only CPU ranks have it"},
	{"Config.EvalEvery", func(c *Config) any { return c.EvalEvery }, 0, (*Config).Evaluates, "needs Config.EvalData: the held-out data"},
	{"Config.Resume", func(c *Config) any { return c.Resume }, false, (*Config).checkpoints, "needs Config.Checkpoint: the folder to resume from"},
	{"Config.AcceptChanges", func(c *Config) any { return c.AcceptChanges }, false, func(c *Config) bool { return c.Resume }, "is for Config.Resume: changes since the checkpoint"},
	{"Config.SaveEvery", func(c *Config) any { return c.SaveEvery }, 0, (*Config).checkpoints, "needs Config.Checkpoint: the folder to save to"},
	{"Config.ReceiptEvery", func(c *Config) any { return c.ReceiptEvery }, 0, func(c *Config) bool { return c.Receipt != "" }, "needs Config.Receipt: the file whose lines it counts"},
	{"Config.Receipt", func(c *Config) any { return c.Receipt != "" }, false, func(c *Config) bool { return !c.Inference }, "with Config.Inference: nothing is trained; leave it out"},
	{"Config.Keep %v", func(c *Config) any { return c.Keep }, standard.Keep, (*Config).checkpoints, "needs Config.Checkpoint: the folder whose checkpoints it counts"},
	{"Config.DiskCache", func(c *Config) any { return c.DiskCache }, int64(0), func(c *Config) bool { return c.Disk != "" }, "needs Config.Disk: the folder whose files it holds in memory"},
	{"Config.MinLR %v", func(c *Config) any { return c.MinLR }, standard.MinLR, func(c *Config) bool { return c.Own.Schedule != nil || !strings.EqualFold(c.LRSchedule, "constant") },
		"with Config.LRSchedule constant: the rate never falls; give another schedule (linear, cosine, inverse-sqrt), or leave it out"},
	{"Config.MinLR %v", func(c *Config) any { return c.MinLR }, standard.MinLR, func(c *Config) bool {
		return c.Own.Schedule != nil || !strings.EqualFold(c.LRScale, "none") || c.MinLR <= c.LR
	},
		"is above Config.LR: it is what the rate falls to; give a smaller one"},
	{"Config.LRBaseBatch %v", func(c *Config) any { return c.LRBaseBatch }, standard.LRBaseBatch, func(c *Config) bool { return !strings.EqualFold(c.LRScale, "none") },
		"with Config.LRScale none: the rate is not scaled; give Config.LRScale sqrt or linear, or leave it out"},
}

// toldAlone are fields that give only a note if they have no effect: the run is the same
// without them, and settings shared by several runs may have them.
var toldAlone = []pair{
	{"Config.EvalSteps %v", func(c *Config) any { return c.EvalSteps }, standard.EvalSteps, (*Config).Evaluates, "changes nothing: without Config.EvalData nothing is evaluated"},
	{"Config.Warmup %v", func(c *Config) any { return c.Warmup }, 0, func(c *Config) bool { return c.Own.Schedule != nil || c.Warmup <= c.Steps },
		"is more than Config.Steps: the rate does not reach Config.LR; a tenth of the steps is usual"},
	{"Config.Trust %v", func(c *Config) any { return c.Trust }, standard.Trust, ofOptimizers(zero.Trust),
		forOptimizers(zero.Trust)},
	{"Config.AdaptAll", func(c *Config) any { return c.AdaptAll }, false, ofOptimizers(zero.AdaptAll),
		forOptimizers(zero.AdaptAll)},
	{"Config.Beta1 %v", func(c *Config) any { return c.Beta1 }, standard.Beta1, ofOptimizers(zero.Beta1),
		forOptimizers(zero.Beta1)},
	{"Config.Beta2 %v", func(c *Config) any { return c.Beta2 }, standard.Beta2, ofOptimizers(zero.Beta2),
		forOptimizers(zero.Beta2) + ", which have a second moment"},
	{"Config.Eps %v", func(c *Config) any { return c.Eps }, standard.Eps, ofOptimizers(zero.Eps),
		forOptimizers(zero.Eps)},
	{"Config.Prefetch %v", func(c *Config) any { return c.Prefetch }, standard.Prefetch, func(c *Config) bool { return c.Prefetch < 2 || c.Zero == 3 || c.Offload != "" },
		"changes nothing: parameters are gathered at Config.Zero 3 alone, and nothing rests off the device"},
	{"Config.ShardSize %v", func(c *Config) any { return c.ShardSize }, 0, func(c *Config) bool { return c.Zero > 0 },
		"changes nothing: at Config.Zero 0 nothing is sharded"},
	{"Config.PipelineSchedule %v", func(c *Config) any { return c.TurnsOfStages() }, mesh.OneForwardOneBackward, (*Config).Pipelined,
		"changes nothing: without Config.Pipeline there is one stage"},
	{"Config.AccumOrder", func(c *Config) any { return c.AsksLayers() }, false, func(c *Config) bool { return c.Accum > 1 },
		"layer changes nothing: a step has one micro-batch (Config.Accum 1)"},
	{"Config.Overlap", func(c *Config) any { return c.Serial() }, false, func(c *Config) bool { return c.Ranks > 1 },
		"off changes nothing: one rank has no collectives"},
	{"Config.AsyncSave", func(c *Config) any { return strings.EqualFold(c.AsyncSave, AsyncOff) }, false, (*Config).checkpoints,
		"off changes nothing: without Config.Checkpoint nothing is saved"},
}

func (c *Config) checkpoints() bool { return c.Checkpoint != "" }

// ofOptimizers says whether the optimizer uses a constant: its rule reads it, or is the
// program's own.
func ofOptimizers(of zero.Constant) func(c *Config) bool {
	return func(c *Config) bool { return c.Own.Rule != nil || c.UpdateRule().Reads(of) }
}

// forOptimizers returns the rest of the sentence for a constant that only some rules use.
func forOptimizers(of zero.Constant) string {
	return "changes nothing: it is for Config.Optimizer " + english.WordSeries(zero.NamesReading(of), "and")
}

// refuseIdle refuses the first field of refusedAlone that has no effect.
func (c *Config) refuseIdle() error {
	for i := range refusedAlone {
		if p := &refusedAlone[i]; p.idle(c) {
			return Refuse("%s", p.sentence(c))
		}
	}
	return nil
}

// IdleNotes returns notes about fields that change nothing in this run. Steps must be known.
func (c *Config) IdleNotes() (notes []string) {
	for i := range toldAlone {
		if p := &toldAlone[i]; p.idle(c) {
			notes = append(notes, p.sentence(c))
		}
	}
	return notes
}
