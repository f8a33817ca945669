package planning

import (
	"context"
	"fmt"
	"io"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/precision"
)

// takeFitted sets c to the choices of the search.
func takeFitted(c *config.Config, best *planner.Fitted) {
	b := best.Forecast.Config
	c.Zero, c.Batch, c.Accum, c.AccumOrder, c.Prefetch = b.Zero, b.Batch, b.Accum, b.AccumOrder, b.Prefetch
	c.Recompute, c.Offload, c.Precision = b.Recompute, b.Offload, b.Precision
	if best.Caps[graph.Device] > 0 {
		c.DeviceMemory = best.Caps[graph.Device]
	}
	if best.Caps[graph.Host] > 0 {
		c.HostMemory = best.Caps[graph.Host]
	}
}

// recommendation is the advice to the user: flags to copy, or a sentence if there are none; the
// time and speed; and further lines.
type recommendation struct {
	flags, words, took string
	lines              []string
}

// fittedText describes the choices of the search and their reasons.
func (f *Flags) fittedText(best *planner.Fitted) *recommendation {
	return &recommendation{flags: cli.FlagText(best.Choices), lines: cli.FlaggedAll(best.Reasons),
		took: fmt.Sprintf("the fastest by prediction of %d configurations planned: %s a step and %s", best.Tried,
			f.seconds(best.Forecast, best.Step.Seconds), f.speed(best.Forecast))}
}

func (rec *recommendation) print(w io.Writer) {
	cli.WrapFlags(w, "recommended: ", "  ", rec.flags)
	for _, line := range append([]string{rec.took}, rec.lines...) {
		cli.Wrap(w, "  ", "    ", line)
	}
}

// Take prints the choices of the search with their reasons, and sets c to them.
func Take(w io.Writer, c *config.Config, best *planner.Fitted) {
	(&Flags{}).fittedText(best).print(w)
	takeFitted(c, best)
}

// recommend searches for the fastest configuration with the same rows of a step, ranks and layout.
// It also keeps the micro-batch, unless --global-batch leaves that open. If the request does not
// fit, the search for ways out has already covered the settings left open with that precision and
// micro-batch.
func (r *planReport) recommend(ctx context.Context, c config.Config, hw planner.Hardware) {
	given := planner.Fixed{Precision: r.flags.precisionGiven, Accum: r.flags.accumGiven}
	free := c
	free.Recompute, free.Offload, free.GlobalBatch = "none", "", 0
	if r.asked.Fits || hw.Prefer != precision.FP32 || r.flags.openRows > 0 {
		r.flags.progress.Says("searching for the fastest configuration that fits …")
		best, err := r.flags.request(free).Fit(ctx, given, r.flags.openRows, hw)
		if err == nil {
			r.best = best
		}
	}
	if way := faster(r.best, r.ways); way != nil {
		r.best = &planner.Fitted{Forecast: way.Forecast, Choices: way.Changes, Reasons: planner.Reasons(way.Forecast)}
		if why := planner.OtherBits(&c, &way.Forecast.Config); why != "" {
			r.best.Reasons = append(r.best.Reasons, why)
		}
	}
}

// faster returns the fastest of the ways out without a cost; nil: none is faster than found, which
// may be nil.
func faster(found *planner.Fitted, ways []planner.Way) (best *planner.Way) {
	least := 0.0 // tokens a second
	if found != nil {
		least = found.TokensPerSecond()
	}
	for i := range ways {
		if speed := ways[i].Forecast.TokensPerSecond(); ways[i].Cost == "" && speed > least {
			best, least = &ways[i], speed
		}
	}
	return best
}

// recommended compares the recommended configuration with the requested one; nil: there is none.
func (r *planReport) recommended() *recommendation {
	asked, best := r.asked, r.best
	if best == nil {
		return nil
	}
	if r.flags.chosen {
		return r.flags.fittedText(best)
	}
	f := r.flags
	took := fmt.Sprintf("%s a step and %s predicted", f.seconds(best.Forecast, best.Step.Seconds),
		f.speed(best.Forecast))
	switch ratio := best.TokensPerSecond() / asked.TokensPerSecond(); {
	case asked.Fits && ratio < sameSpeed:
		words := fmt.Sprintf("as requested; nothing found is faster (%s a step, %s predicted)", f.step(asked),
			f.speed(asked))
		return &recommendation{words: words, lines: cli.Reasons(asked)[:1]}
	case asked.Fits:
		took += fmt.Sprintf(", against %s as requested (%.2f × as fast)", f.step(asked), ratio)
	default:
		took += fmt.Sprintf("; as requested it does not fit, and would take %s", f.step(asked))
	}
	return &recommendation{flags: cli.FlagText(best.Choices), took: took,
		lines: cli.FlaggedAll(best.Reasons)}
}
