package spillway

import (
	"errors"
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
// axis at most one applies, and each needs less than the one before it.
func changeAxes(cfg Config, hw Hardware) [][]change {
	var axes [][]change
	axis := func(list ...change) {
		if len(list) > 0 {
			axes = append(axes, list)
		}
	}
	var list []change
	if cfg.Ranks > 1 {
		for z := cfg.Zero + 1; z <= 3; z++ {
			list = append(list, change{fmt.Sprintf("--zero %d", z), sameJob, func(c *Config) { c.Zero = z }})
		}
	}
	axis(list...)
	list = nil
	if cfg.ShardSize > 0 {
		for n := cfg.ShardSize + 1; n <= cfg.Ranks; n++ {
			if cfg.Ranks%n == 0 && n%cfg.ShardSize == 0 {
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
	if cfg.Offload == "" {
		for _, where := range wholePlacements[1:] {
			list = append(list, change{"--offload " + where, sameJob, func(c *Config) { c.Offload = where }})
		}
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

// ladder applies changes of one axis on top of fixed ones.
func ladder(cfg Config, fixed, rungs []change) plan.Ladder[Config] {
	var l plan.Ladder[Config]
	for _, r := range rungs {
		c := cfg
		var texts []string
		for _, s := range append(slices.Clone(fixed), r) {
			s.apply(&c)
			l.Order = max(l.Order, s.order)
			texts = append(texts, s.text)
		}
		l.Rungs = append(l.Rungs, c)
		l.Texts = append(l.Texts, strings.Join(texts, " "))
	}
	return l
}

// WaysOut looks for changes that make a configuration fit which does not, and
// returns the fastest that keep the job as it is, up to three, and where there
// are not two of those, ones that change numbers, need more ranks or shrink the
// job. Each was planned, and fits.
// Single changes come first, then pairs, then everything that keeps the job; a
// set of changes is not looked at where a part of it fits. The second result is
// the smallest need of each space that it came across, in bytes.
func WaysOut(asked *Forecast, hw Hardware) (ways []Way, smallest [graph.NumSpaces]int64) {
	cfg := asked.Config
	for sp := range smallest {
		smallest[sp] = asked.Plan.Layout.Spaces[sp].Peak
	}
	var mu sync.Mutex
	try := func(c Config) (*Forecast, float64, bool, error) {
		if c.ShardSize > 0 && c.Ranks%c.ShardSize != 0 || statesTooLarge(asked, &c) {
			return nil, 0, false, nil
		}
		f, err := predict(c, hw.Machine(c.Ranks), early)
		var refused *plan.DoesNotFit
		mu.Lock()
		defer mu.Unlock()
		switch {
		case errors.As(err, &refused):
			smallest[refused.Space] = min(smallest[refused.Space], refused.Peak)
			return nil, 0, false, nil
		case err != nil:
			return nil, 0, false, err
		}
		for sp := range smallest {
			smallest[sp] = min(smallest[sp], f.Plan.Layout.Spaces[sp].Peak)
		}
		return f, float64(c.Ranks) / f.TokensPerSecond(), f.Fits, nil
	}
	axes := changeAxes(cfg, hw)
	var same, other [][]change
	for _, a := range axes {
		if a[0].order == sameJob {
			same = append(same, a)
		} else {
			other = append(other, a)
		}
	}
	perToken := float64(cfg.Ranks) / asked.TokensPerSecond()
	climb := func(ladders []plan.Ladder[Config], limit int) (fit []int) {
		for _, f := range plan.Climb(ladders, try) {
			fit = append(fit, f.Ladder)
			if limit > 0 {
				limit--
				ways = append(ways, Way{Text: f.Text, Forecast: f.Result, Slowdown: f.Seconds / perToken, Cost: wayCosts[f.Order]})
			}
		}
		return fit
	}
	var singles []plan.Ladder[Config]
	for _, a := range same {
		singles = append(singles, ladder(cfg, nil, a))
	}
	enough := map[int]bool{} // axes that do alone
	for _, i := range climb(singles, 3) {
		enough[i] = true
	}
	if len(ways) < 3 {
		var pairs []plan.Ladder[Config]
		for i, a := range same {
			for j, b := range same[i+1:] {
				if !enough[i] && !enough[i+1+j] {
					for _, x := range a {
						pairs = append(pairs, ladder(cfg, []change{x}, b))
					}
				}
			}
		}
		climb(pairs, 3-len(ways))
	}
	strongest := make([]change, 0, len(same))
	for _, a := range same {
		strongest = append(strongest, a[len(a)-1])
	}
	if n := len(strongest); len(ways) == 0 && n > 2 {
		climb([]plan.Ladder[Config]{ladder(cfg, strongest[:n-1], same[n-1])}, 1)
	}
	if len(ways) > 1 {
		return ways, smallest
	}
	// What else would do: the least of it beside everything that keeps the job, and
	// then without what of that was not needed.
	base := strongest
	if len(ways) > 0 {
		base = nil
	}
	others := make([]*Way, len(other))
	plan.Parallel(len(other), func(k int) {
		a := other[k]
		found := plan.Climb([]plan.Ladder[Config]{ladder(cfg, base, a)}, try)
		if len(found) == 0 {
			return
		}
		rung := a[found[0].Rung]
		kept := slices.Clone(base)
		best := found[0]
		for i := len(base) - 1; i >= 0; i-- {
			fewer := slices.DeleteFunc(slices.Clone(kept), func(c change) bool { return c.text == base[i].text })
			if f := plan.Climb([]plan.Ladder[Config]{ladder(cfg, fewer, []change{rung})}, try); len(f) > 0 {
				kept, best = fewer, f[0]
			}
		}
		others[k] = &Way{Text: best.Text, Forecast: best.Result, Slowdown: best.Seconds / perToken, Cost: wayCosts[best.Order]}
	})
	for _, w := range others {
		if w != nil {
			ways = append(ways, *w)
		}
	}
	return ways, smallest
}

// statesTooLarge says that a configuration's model states alone are over the
// cap of device memory, without a plan: all of them are alive in the update.
func statesTooLarge(asked *Forecast, c *Config) bool {
	if c.DeviceMemory == 0 || len(c.Freeze) > 0 || c.Offload != "" {
		return false
	}
	flat, _ := c.optimizer().StateNames()
	weight, grad, states := 4.0, 4.0, 4*float64(len(flat))
	if p := strings.ToLower(c.Precision); p == "bf16" || p == "fp16" {
		weight, grad, states = 2, 2, states+4
	}
	ranks := c.Ranks
	if c.ShardSize > 0 {
		ranks = c.ShardSize
	}
	least := zero.Stage(c.Zero).ModelStateBytes(float64(asked.Parameters()), float64(ranks), weight, grad, states)
	return least > float64(c.DeviceMemory-c.Outside[graph.Device])
}
