package planner

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/dustin/go-humanize/english"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/search"
)

// Hardware is the hardware for which a plan's time is predicted.
type Hardware = search.Hardware

// Over returns hw with collectives as measured over a transport; without measurements, hw itself.
func Over(hw Hardware, links []cost.Links, transport string) Hardware {
	if cost.NearestLinks(links, transport, 1) == nil {
		return hw
	}
	machine := hw.Machine
	hw.Machine = func(ranks int) *cost.Machine { return cost.NearestLinks(links, transport, ranks).On(machine(ranks)) }
	return hw
}

// Budget limits the plans that the searches of one command evaluate together.
type Budget = search.Budget

// NewBudget allows the given number of plans; 0: the number that takes about 5 s of a processor, by
// the size of the first job.
func NewBudget(plans int) *Budget { return search.NewBudget(plans) }

// refusalEffort is the effort of the search for the ways out that an error lists: some tenths of a
// second for small models.
const refusalEffort = 160

// quick returns hw with refusalEffort if it sets no effort and no budget: a user waits for the
// error.
func quick(hw Hardware) Hardware {
	if hw.Effort == 0 && hw.Budget == nil {
		hw.Effort = refusalEffort
	}
	return hw
}

// LargerDevice is a device that a plan could move to.
type LargerDevice = search.LargerDevice

// CPUHardware returns the CPU device of this process with the given number of threads, before
// calibration.
func CPUHardware(threads int) Hardware { return search.CPUHardware(threads) }

// Way is a change of a configuration that makes it fit.
type Way struct {
	Changes  Settings // replace those of the configuration
	Forecast *Forecast
	// Slowdown is the predicted time per token, summed over ranks, divided by that of the
	// configuration as asked, if it had fitted.
	Slowdown float64
	Cost     string // "", "a disk", "other numbers", "more host memory", "more ranks", "a larger GPU", "a smaller job"
	Note     string // the choice of "auto"
}

// variants returns jobs that need less memory and give other numbers: with moments of 8 bits, and
// with states in bf16, if the configuration allows it.
func (r planner) variants() (list []search.Variant) {
	add := func(c config.Config, texts ...string) {
		q := r.Request
		q.Config = c
		if p, err := q.resolve(); err == nil {
			v := search.Variant{Job: p}
			for _, text := range texts {
				v.Changes = append(v.Changes, search.Change{Field: search.Other, Text: text})
			}
			list = append(list, v)
		}
	}
	if r.Inference {
		return nil
	}
	if !r.In8Bits("optimizer") {
		c := r.Config
		c.Int8 = append(slices.Clone(c.Int8), "optimizer")
		add(c, "Config.Int8 "+strings.Join(c.Int8, ","))
	}
	if !r.BF16States() {
		c := r.Config
		c.OptimizerDType, c.StochasticRounding = "bf16", true
		add(c, "Config.OptimizerDType bf16", "Config.StochasticRounding true")
	}
	return list
}

// NoWay describes a search that found no change that makes a configuration fit.
type NoWay struct {
	Nearest *Forecast // the plan nearest to the caps, of the same job on the same ranks
	Choices Settings  // of Nearest
	Tried   int       // configurations planned
	Beyond  []string  // names of the other changes tried
	Spent   bool      // the effort was used up before all was tried
}

func (n *NoWay) String() string {
	text := fmt.Sprintf("Nothing of %s tried makes it fit.", english.Plural(n.Tried, "configuration", ""))
	if n.Nearest != nil {
		text += fmt.Sprintf(" The nearest, %s, %s.", n.Choices, Shortfall(n.Nearest))
	}
	switch {
	case n.Spent:
		text += " The effort was used up."
	case len(n.Beyond) > 0:
		text += " Tried in vain beside it: " + strings.Join(n.Beyond, ", ") + "."
	}
	return text
}

// WaysOut looks for changes that make a configuration fit. It tries single ones (stage, shard size,
// prefetch, recomputation, placement, micro-batch) and the fastest of their combinations. If it
// then has no way, or one way of more than two changes, it tries a disk, other numbers, more or
// larger devices, and shorter rows.
//
// Each way was planned and fits. Ways that keep the job come first, then the fastest. If there are
// none, the second result has the nearest plan.
func WaysOut(ctx context.Context, asked *Forecast, hw Hardware) ([]Way, *NoWay) {
	hw.Variants = asked.of.variants()
	found, none := search.WaysOut(ctx, asked.found, hw)
	if none != nil {
		no := &NoWay{Nearest: asked.of.forecast(none.Nearest), Tried: none.Tried, Beyond: none.Beyond, Spent: none.Spent}
		if none.Nearest != nil {
			no.Choices = choices(&none.Nearest.Spec, none.Batches, false)
		}
		return nil, no
	}
	ways := make([]Way, len(found))
	for i, w := range found {
		of := asked.of
		if job, ok := w.Forecast.Spec.Job.(planner); ok {
			of = job
		}
		f := of.forecast(w.Forecast)
		ways[i] = Way{Changes: settingsOf(w.Changes, asked.Config.LocalRanks), Forecast: f, Slowdown: w.Slowdown, Cost: w.Cost, Note: f.Auto}
	}
	return ways, nil
}

// refusal adds to the error of a plan the changes that make it fit.
func refusal(err error, ways []Way, no *NoWay) error {
	if len(ways) == 0 {
		return fmt.Errorf("%w; %s", err, strings.TrimSuffix(strings.ToLower(no.String()[:1])+no.String()[1:], "."))
	}
	return &Refusal{Cause: err, Ways: ways, text: err.Error() + "; " + waysText(ways)}
}

func waysText(ways []Way) string {
	var texts []string
	for _, way := range ways {
		text := way.Changes.String()
		if way.Cost != "" {
			text += " (" + way.Cost + ")"
		}
		texts = append(texts, text)
	}
	return "it fits with " + strings.Join(texts, ", or with ")
}

// Refusal is the error of a plan that does not fit, with changes that make it fit.
type Refusal struct {
	Cause error // a *plan.DoesNotFit
	Ways  []Way // at least one
	text  string
}

// Because returns the refusal with another cause.
func (r *Refusal) Because(cause error) *Refusal {
	return &Refusal{Cause: cause, Ways: r.Ways, text: cause.Error() + "; " + waysText(r.Ways)}
}

func (r *Refusal) Error() string { return r.text }
func (r *Refusal) Unwrap() error { return r.Cause }

// Fits returns nil if the plan is within its capacities. Otherwise the error lists changes that
// make it fit.
func (r *Resolved) Fits(ctx context.Context, p *plan.Plan, hw Hardware) error {
	err := p.Fit()
	if err == nil {
		return nil
	}
	if caches := smallerCaches(&r.Config, p); caches != "" {
		return fmt.Errorf("%w; it fits with %s", err, caches)
	}
	asked, simErr := r.Predict(ctx, hw.Machine(r.Ranks))
	if simErr != nil {
		return errors.Join(err, simErr)
	}
	asked.found.Chosen = r.Chosen // as it was asked for
	ways, no := WaysOut(ctx, asked, quick(hw))
	if err := ctx.Err(); err != nil {
		return err
	}
	return refusal(err, ways, no)
}
