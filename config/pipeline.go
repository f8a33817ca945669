package config

import (
	"strconv"
	"strings"

	"github.com/dustin/go-humanize/english"

	"github.com/spillway-ml/spillway/comm/algorithm"
	"github.com/spillway-ml/spillway/mesh"
)

// Pipelined says whether the layers are divided over stages.
func (c *Config) Pipelined() bool { return c.Pipeline > 1 }

// TurnsOfStages returns the schedule of PipelineSchedule.
func (c *Config) TurnsOfStages() mesh.Schedule {
	s, _ := mesh.ParseSchedule(strings.ToLower(c.PipelineSchedule)) // Validate has refused all others
	return s
}

// FirstLayers returns the first layer of each stage that Stages names, and the number of layers of
// all stages; nil if Stages is empty.
func (c *Config) FirstLayers() (first []int, next int, err error) {
	if c.Stages == "" {
		return nil, 0, nil
	}
	for _, text := range strings.Split(c.Stages, ",") {
		from, to, several := strings.Cut(strings.TrimSpace(text), "-")
		if !several {
			to = from
		}
		a, err := strconv.Atoi(from)
		b, err2 := strconv.Atoi(to)
		if err != nil || err2 != nil || a != next || b < a {
			return nil, 0, Refuse("Config.Stages %.80q: stage %d is %.40q, and has to begin at layer %d; "+
				"give each stage of Config.Pipeline its layers in turn, as in 0-5,6-11", c.Stages, len(first), text, next)
		}
		first, next = append(first, a), b+1
	}
	if len(first) != c.Pipeline {
		return nil, 0, Refuse("Config.Stages %.80q has %s, and Config.Pipeline is %d; give one range of layers for each stage",
			c.Stages, english.Plural(len(first), "range", ""), c.Pipeline)
	}
	return first, next, nil
}

// validPipeline checks the division into stages, and refuses fields that a pipeline does not
// support.
func validPipeline(c *Config) error {
	if c.Pipeline < 0 || int64(c.Pipeline) > largest["Ranks"] {
		return Refuse("Config.Pipeline %d: 1 to %d stages are possible", c.Pipeline, largest["Ranks"])
	}
	if c.PipelineSchedule != "" {
		if _, err := mesh.ParseSchedule(strings.ToLower(c.PipelineSchedule)); err != nil {
			return Refuse("Config.PipelineSchedule: %w", err)
		}
	}
	if !c.Pipelined() {
		if c.Stages != "" {
			return Refuse("Config.Stages %.80q needs Config.Pipeline: the number of stages", c.Stages)
		}
		return nil
	}
	if c.Zero > 1 {
		return Refuse("Config.Zero %d with Config.Pipeline: a stage would gather parameters or reduce gradients for every micro-batch; give Config.Zero 0 or 1", c.Zero)
	}
	for _, given := range besidePipeline {
		if what := given(c); what != "" {
			return Refuse("Config.%s with Config.Pipeline: not built; leave one of them out", what)
		}
	}
	_, _, err := c.FirstLayers()
	return err
}

// besidePipeline lists the fields that are refused with a pipeline. Each function returns the
// field's name, or "" if it is not set.
var besidePipeline = []func(c *Config) string{
	whereGiven("Own.Model", func(c *Config) bool { return c.Own.Model != nil }),
	whereGiven("Own.Rule", func(c *Config) bool { return c.Own.Rule != nil }),
	whereGiven("Inference", func(c *Config) bool { return c.Inference }),
	whereGiven("Generate", func(c *Config) bool { return c.Generate }),
	whereGiven("AccumOrder layer", (*Config).AsksLayers),
	whereGiven("Int8", func(c *Config) bool { return len(c.Int8) > 0 }),
	whereGiven("RankShares", func(c *Config) bool { return c.RankShares != nil }),
	whereGiven("BatchSchedule", func(c *Config) bool { return len(c.BatchSchedule) > 0 }),
	whereGiven("FrozenCache", func(c *Config) bool { return c.FrozenCache.Bytes != 0 }),
	whereGiven("Receipt", func(c *Config) bool { return c.Receipt != "" }),
	whereGiven("Collectives ring", func(c *Config) bool { return c.Algorithm() == algorithm.Ring }),
}
