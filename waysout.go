package spillway

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/zero"
)

// Hardware is what a plan's time is predicted on.
type Hardware struct {
	// Machine gives the rates of one of so many ranks.
	Machine func(ranks int) *cost.Machine
	// NodeSize is the ranks of a node where ranks are counted in nodes; 0: they are
	// not.
	NodeSize int
	// HalfPrecision says that products of 16-bit operands have units of their own.
	HalfPrecision bool
}

// CPUHardware is the CPU device of this process with so many threads, before it
// is calibrated.
func CPUHardware(threads int) Hardware {
	return Hardware{Machine: func(ranks int) *cost.Machine { return cost.CPU(threads, ranks) }}
}

// What a way out costs beside time.
const (
	sameJob      = iota // the same steps, the same numbers, the same ranks
	moreHardware        // more ranks
	otherNumbers        // another precision
	smallerJob          // shorter rows
)

// Way is a change of a configuration that makes it fit.
type Way struct {
	Text     string // flags that replace those of the configuration
	Forecast *Forecast
	// Slowdown is the predicted time of a token over that of the configuration as
	// asked, if it had fitted; ranks together.
	Slowdown float64
	Cost     string // "", "more ranks", "other numbers", "a smaller job"
}

var wayCosts = [...]string{sameJob: "", moreHardware: "more ranks", otherNumbers: "other numbers", smallerJob: "a smaller job"}

// change is a single change of a Config.
type change struct {
	text  string
	order int
	apply func(*Config)
}

// changeAxes returns the single changes that need less memory, by axis: of one
// axis at most one applies.
func changeAxes(cfg Config, hw Hardware) [][]change {
	var axes [][]change
	axis := func(list ...change) {
		if len(list) > 0 {
			axes = append(axes, list)
		}
	}
	var list []change
	if cfg.Ranks > 1 {
		for z := 3; z > cfg.Zero; z-- {
			list = append(list, change{fmt.Sprintf("--zero %d", z), sameJob, func(c *Config) { c.Zero = z }})
		}
	}
	axis(list...)
	list = nil
	if n := cfg.ShardSize; n > 0 {
		for n *= 2; n <= cfg.Ranks; n *= 2 {
			if cfg.Ranks%n == 0 {
				list = append(list, change{fmt.Sprintf("--shard-size %d", n), sameJob, func(c *Config) { c.ShardSize = n }})
			}
		}
	}
	axis(list...)
	if cfg.Prefetch > 0 {
		axis(change{"--prefetch 0", sameJob, func(c *Config) { c.Prefetch = 0 }})
	}
	list = nil
	for _, policy := range recomputePolicies(cfg.Recompute) {
		list = append(list, change{"--recompute " + policy, sameJob, func(c *Config) { c.Recompute = policy }})
	}
	axis(list...)
	list = nil
	for batch, accum := cfg.Batch, cfg.Accum; batch > 1; {
		if batch%2 != 0 {
			batch, accum = 1, accum*batch
		} else {
			batch, accum = batch/2, accum*2
		}
		list = append(list, change{fmt.Sprintf("--batch %d --accum %d", batch, accum), sameJob, func(c *Config) { c.Batch, c.Accum = batch, accum }})
	}
	axis(list...)
	if p := strings.ToLower(cfg.Precision); p == "" || p == "fp32" {
		if hw.HalfPrecision {
			axis(change{"--precision bf16", otherNumbers, func(c *Config) { c.Precision = "bf16" }})
		}
	}
	list = nil
	for ranks := cfg.Ranks * 2; ranks <= max(64, 64*cfg.Ranks) && ranks <= 1<<15; ranks *= 2 {
		text := fmt.Sprintf("--ranks %d", ranks)
		if hw.NodeSize > 0 && ranks%hw.NodeSize == 0 {
			text = fmt.Sprintf("--nodes %d --gpus-per-node %d", ranks/hw.NodeSize, hw.NodeSize)
		}
		list = append(list, change{text, moreHardware, func(c *Config) { c.Ranks = ranks }})
	}
	axis(list...)
	list = nil
	for seq := cfg.Seq / 2; seq >= 16; seq /= 2 {
		list = append(list, change{fmt.Sprintf("--seq %d", seq), smallerJob, func(c *Config) { c.Seq = seq }})
	}
	axis(list...)
	return axes
}

// recomputePolicies are those that keep less than the given one.
func recomputePolicies(now string) []string {
	switch strings.ToLower(now) {
	case "", "none":
		return []string{"selective", "full"}
	case "selective":
		return []string{"full"}
	}
	return nil
}

// wayCandidates combines changes of different axes: all of one and two axes, and
// all of the axes that keep the job as it is, alone and with one that does not.
func wayCandidates(cfg Config, hw Hardware, tooLarge func(*Config) bool) []plan.Candidate[Config] {
	var out []plan.Candidate[Config]
	seen := map[string]bool{}
	add := func(set []change) {
		c := plan.Candidate[Config]{Config: cfg}
		for _, s := range set {
			s.apply(&c.Config)
			c.Order = max(c.Order, s.order)
			c.Changes = append(c.Changes, s.text)
		}
		c.Text = strings.Join(c.Changes, " ")
		if seen[c.Text] || c.Config.ShardSize > 0 && c.Config.Ranks%c.Config.ShardSize != 0 {
			return
		}
		seen[c.Text] = true
		c.TooLarge = tooLarge(&c.Config)
		out = append(out, c)
	}
	axes := changeAxes(cfg, hw)
	var keep [][]change // axes that keep the job
	for _, a := range axes {
		if a[0].order == sameJob {
			keep = append(keep, a)
		}
	}
	for _, a := range axes {
		for _, x := range a {
			add([]change{x})
		}
	}
	for i, a := range axes {
		for _, b := range axes[i+1:] {
			for _, x := range a {
				for _, y := range b {
					add([]change{x, y})
				}
			}
		}
	}
	// The most that keeps the job: of every axis the strongest change (of stages the
	// first in the list, of the others the last).
	var all []change
	for _, a := range keep {
		x := a[len(a)-1]
		if strings.HasPrefix(x.text, "--zero") {
			x = a[0]
		}
		all = append(all, x)
	}
	if len(all) > 2 {
		add(all)
	}
	for _, a := range axes {
		if a[0].order == sameJob {
			continue
		}
		for _, x := range a {
			add(append(slices.Clone(all), x))
		}
	}
	return out
}

// planWork bounds the ways that are planned: operations of all of their
// programs together. It is a count and not a time, so that the answer is the
// same on every machine.
const planWork = 120_000

// WaysOut looks for changes that make a configuration fit which does not, and
// returns up to four: the fastest that keep the job as it is, then the ones that
// need more ranks, change numbers or shrink the job. Each was planned, and fits.
// The second result is the smallest peak of each space that it came across, in
// bytes.
func WaysOut(asked *Forecast, hw Hardware) (ways []Way, smallest [graph.NumSpaces]int64) {
	cfg := asked.Config
	params := float64(asked.Parameters())
	capacity := cfg.DeviceMemory - cfg.Outside[graph.Device]
	flat, _ := cfg.optimizer().StateNames()
	// Its states alone are a lower bound of any plan: they are all alive in the update.
	tooLarge := func(c *Config) bool {
		if cfg.DeviceMemory == 0 || len(cfg.Freeze) > 0 {
			return false
		}
		weight, grad, states := 4.0, 4.0, 4*float64(len(flat))
		if p := strings.ToLower(c.Precision); p == "bf16" || p == "fp16" {
			weight, grad, states = 2, 2, states+4
		}
		ranks := c.Ranks
		if c.ShardSize > 0 {
			ranks = c.ShardSize
		}
		return zero.Stage(c.Zero).ModelStateBytes(params, float64(ranks), weight, grad, states) > float64(capacity)
	}
	ops := 1
	for i := range asked.Plan.Program.Sections {
		for j := range asked.Plan.Program.Sections[i].Phases {
			ops += len(asked.Plan.Program.Sections[i].Phases[j].Ops)
		}
	}
	var mu sync.Mutex
	lower := func(f *Forecast) {
		mu.Lock()
		defer mu.Unlock()
		for sp := range smallest {
			smallest[sp] = min(smallest[sp], f.Plan.Layout.Spaces[sp].Peak)
		}
	}
	for sp := range smallest {
		smallest[sp] = asked.Plan.Layout.Spaces[sp].Peak
	}
	found := plan.Search(wayCandidates(cfg, hw, tooLarge), max(4, planWork/ops), func(c Config) (*Forecast, float64, bool, error) {
		f, err := Predict(c, hw.Machine(c.Ranks))
		if err != nil {
			return nil, 0, false, err
		}
		lower(f)
		return f, 1 / f.TokensPerSecond() * float64(c.Ranks), f.Fits, nil
	})
	perToken := float64(cfg.Ranks) / asked.TokensPerSecond()
	count := map[int]int{}
	for _, f := range found {
		limit := 1
		if f.Candidate.Order == sameJob {
			limit = 3
		}
		if count[f.Candidate.Order] == limit || len(ways) == 4 {
			continue
		}
		count[f.Candidate.Order]++
		ways = append(ways, Way{Text: f.Candidate.Text, Forecast: f.Result, Slowdown: f.Seconds / perToken, Cost: wayCosts[f.Candidate.Order]})
	}
	return ways, smallest
}
