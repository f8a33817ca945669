package planner

import (
	"context"
	"errors"
	"fmt"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/search"
)

// Fitted is the outcome of a search for the fastest configuration that fits.
type Fitted struct {
	*Forecast
	Choices Settings // what was chosen: in the request, they plan it again
	Reasons []string // what bounds it, why not what would have been faster, and the runners-up, a line each
	Tried   int      // configurations that were planned
	// Caps are those that the machine's memory adds to the request, by space; 0: none.
	Caps [graph.NumSpaces]int64
}

// NothingFits is the error of a search that found no configuration within the
// caps.
type NothingFits struct {
	Tried    int
	Smallest *Forecast // of what was tried, the nearest to the caps; nil: nothing could be planned
	Choices  Settings  // its own
	What     string    // what was allowed to change
	// HostShare is the cap on host memory where it was assumed; 0: it was not.
	HostShare int64
	// Machine is what a rank's device and host memory come out of together, where that
	// bound them; "": it did not.
	Machine string
	// Spent says that the Hardware's Budget ended the search.
	Spent bool
}

func (e *NothingFits) Error() string {
	spent := ""
	if e.Spent {
		spent = "; the search ended there, and a larger Hardware.Effort lets it go on"
	}
	if e.Smallest == nil {
		return fmt.Sprintf("no configuration of %d could be planned", e.Tried) + spent
	}
	text := fmt.Sprintf("nothing of %d configurations fits (%s); the nearest, %s, %s", e.Tried, e.What, e.Choices, Shortfall(e.Smallest)) + spent
	if caches := smallerCaches(&e.Smallest.Config, e.Smallest.Plan); caches != "" {
		text += "; it fits with " + caches
	}
	if e.Machine != "" {
		text += "; device and host memory come out of one, " + e.Machine
	}
	if e.HostShare > 0 {
		text += fmt.Sprintf("; %s of host memory a rank are assumed, as usual for the GPU (Hardware.HostShare says what a server has)", plan.Bytes(e.HostShare))
	}
	return text
}

// WithWays adds to the error what makes the configuration fit that the search
// was not free to change, as a refusal without a search does: smaller
// micro-batches, other precisions, more ranks. What a search knows is never less.
func (e *NothingFits) WithWays(ctx context.Context, cfg config.Config, hw Hardware) error {
	if hw.Machine == nil {
		return e
	}
	asked, err := Predict(ctx, cfg, hw.Machine(cfg.Ranks))
	if err != nil || asked.Fits {
		return e
	}
	ways, no := WaysOut(ctx, asked, quick(hw))
	if len(ways) == 0 {
		return e
	}
	return refusal(e, ways, no)
}

func (e *NothingFits) Unwrap() error {
	if e.Smallest == nil {
		return nil
	}
	return e.Smallest.Plan.Fit()
}

// Fixed are the fields of a Config that a search leaves as they are.
type Fixed struct {
	Zero, Prefetch, Batch, Accum, AccumOrder, Precision, Recompute, Offload bool
}

// Fit chooses what is not fixed so that cfg is fastest by prediction on hw and fits.
// Batch and Accum change only with rows, the rows of a step over all ranks; 0: as cfg
// has them. Activations are
// computed again or parked one kind and layer at a time, and units' states leave
// the device by shares, those first that free the most bytes for a second; disk
// is used where cfg has a folder for it. cfg.Allow adds precisions to choose from.
// It is deterministic. Where nothing fits, the error is a *NothingFits.
func Fit(ctx context.Context, cfg config.Config, fixed Fixed, rows int, hw Hardware) (*Fitted, error) {
	return Request{Config: cfg}.Fit(ctx, fixed, rows, hw)
}

func (q Request) Fit(ctx context.Context, fixed Fixed, rows int, hw Hardware) (*Fitted, error) {
	r, err := q.free(fixed, rows, hw)
	if err != nil {
		return nil, err
	}
	found, err := search.Fit(ctx, r.spec, r.given, r.allowed, r.rows, hw)
	if none, ok := errors.AsType[*search.NothingFits](err); ok {
		e := &NothingFits{Tried: none.Tried, Smallest: r.forecast(none.Smallest), What: none.What, HostShare: none.HostShare, Spent: none.Spent}
		if none.Smallest != nil {
			e.Choices = choices(&none.Smallest.Spec, none.Batches, none.Precisions)
		}
		return nil, e
	}
	if err != nil {
		return nil, r.refusal(err)
	}
	return r.fitted(found), nil
}

// freed is a request as a search takes it, with what the search leaves as it is.
type freed struct {
	planner
	spec    search.Spec
	given   search.Given
	allowed []precision.Precision
	rows    int
}

func (q Request) free(fixed Fixed, rows int, hw Hardware) (*freed, error) {
	if len(q.BatchSchedule) > 0 {
		rows = 0 // it says the rows of each step
	}
	if q.Reproducible && rows > 0 { // whose micro-batch is as given
		var err error
		if q.GlobalBatch = rows; fixed.Accum {
			q.Config, err = q.FollowGlobalBatch(true)
		}
		if rows = 0; err != nil {
			return nil, err
		}
	}
	p, err := q.resolve()
	if err != nil {
		return nil, err
	}
	if hw.Machine == nil {
		return nil, errors.New("fit: the Hardware has no Machine to predict times on; CPUHardware and DeviceHardware give one")
	}
	r := &freed{planner: p, rows: rows, given: search.Given{Stage: fixed.Zero, Prefetch: fixed.Prefetch, Batch: fixed.Batch, Accum: fixed.Accum, LayerOrder: fixed.AccumOrder,
		Precision: fixed.Precision, Recompute: fixed.Recompute, Offload: fixed.Offload, SameBatch: q.Reproducible}}
	if r.spec, err = p.spec(hw.Machine(q.Ranks)); err != nil {
		return nil, err
	}
	for _, name := range q.Allow {
		p, err := precision.Parse(name)
		if err != nil {
			return nil, err
		}
		r.allowed = append(r.allowed, p)
	}
	return r, nil
}

// refusal is a search's error, of rows with those that would do.
func (r *freed) refusal(err error) error {
	if odd, ok := errors.AsType[*search.RowsError](err); ok {
		return rowsText(odd, r.Config, r.given.Accum)
	}
	return err
}

// rowsText says which rows of a step would do.
func rowsText(e *search.RowsError, c config.Config, accumGiven bool) error {
	if e.Batch > 0 {
		return config.Refuse("Config.GlobalBatch %d over %d ranks is %d rows a rank, which Config.Batch %d and Config.Accum %d do not give; leave one of them out", e.Rows, e.Ranks, e.Rows/e.Ranks, e.Batch, e.Accum)
	}
	below := e.Rows / e.Ranks * e.Ranks
	right := fmt.Sprintf("%d is", below+e.Ranks)
	if below > 0 {
		right = fmt.Sprintf("%d and %d are", below, below+e.Ranks)
	}
	c.GlobalBatch = e.Rows
	return c.Uneven(accumGiven, "Config.GlobalBatch %d is not a multiple of %d ranks; %s", e.Rows, e.Ranks, right)
}

// fitted says what was found, and why.
func (r planner) fitted(found *search.Fitted) *Fitted {
	best := r.forecast(found.Forecast)
	out := &Fitted{Forecast: best, Choices: choices(&found.Spec, found.Batches, found.Precisions), Tried: found.Tried}
	out.Reasons = Reasons(best)
	if found.Preferred > 0 {
		out.Reasons = append(out.Reasons, fmt.Sprintf("in %s, for whose products the device has units (%.3g × the rate of fp32); other numbers than fp32's, which Config.Precision fp32 plans",
			found.Spec.Precision, found.Preferred))
	}
	if why := OtherBits(&r.Config, &best.Config); why != "" {
		out.Reasons = append(out.Reasons, why)
	}
	if order := best.AccumOrder(); order != "" && found.Spec.OrderChosen {
		out.Reasons = append(out.Reasons, order)
	}
	for _, u := range found.RunnersUp {
		out.Reasons = append(out.Reasons, fmt.Sprintf("%s fits too, at %.2f × the time a token and %s of device memory", choices(&u.Spec, found.Batches, found.Precisions), u.Slower, plan.Bytes(u.Device)))
	}
	for _, o := range found.Others {
		why := fmt.Sprintf("would take %.2f × the time a token even with memory for everything", o.Slower)
		if o.Slower < 1 {
			why = "was not found to fit with anything that takes no more time"
		}
		out.Reasons = append(out.Reasons, fmt.Sprintf("Config.Zero %d %s", o.Stage, why))
	}
	return out
}

// Reasons say what bounds a plan and what it computes again and moves, a line
// each.
func Reasons(f *Forecast) []string { return append([]string{bound(f)}, Explain(f).Lines()...) }

// OtherBits says that two configurations of one job differ in the last bits of
// their results, as stages below 2 and from 2 on do with accumulation: the first, and
// all in layer order, add up a step's micro-batches before they reduce, the others
// after. "" where they do not.
func OtherBits(asked, chosen *config.Config) string {
	once := func(c *config.Config) bool { return c.Zero < 2 || c.InLayers() }
	if chosen.Ranks == 1 || chosen.Accum == 1 || chosen.Reproducible || once(asked) == once(chosen) {
		return ""
	}
	order := func(c *config.Config) string {
		if chosen.InLayers() == asked.InLayers() {
			return ""
		}
		return " in " + orderName(c.InLayers()) + " order"
	}
	return fmt.Sprintf("with accumulation, stage %d%s differs from stage %d%s in the last bits; Config.Reproducible makes them equal", chosen.Zero, order(chosen), asked.Zero, order(asked))
}

// bound says what a plan's time goes into, and which memory is fullest.
func bound(f *Forecast) string {
	text := fmt.Sprintf("%.1f %% of the step is computing, %.1f %% waiting for copies and communication", 100*(1-f.Step.Exposed/f.Step.Seconds), 100*f.Step.Exposed/f.Step.Seconds)
	worst, at := 0.0, graph.Device
	for sp := range graph.NumSpaces {
		if limit := f.Plan.Config.Capacity[sp]; limit > 0 {
			if share := float64(f.Plan.Layout.Spaces[sp].Peak+f.Plan.Config.Outside[sp]) / float64(limit); share > worst {
				worst, at = share, sp
			}
		}
	}
	if worst > 0 {
		text += fmt.Sprintf("; %s memory is %.1f %% full, at %s", at, 100*worst, f.Plan.Layout.Spaces[at].PeakAt)
	}
	if host := f.Plan.Layout.Spaces[graph.Host].Peak; host > 1<<30 && f.Plan.Config.Capacity[graph.Host] == 0 {
		text += fmt.Sprintf("; it takes %s of host memory a rank", plan.Bytes(host+f.Plan.Config.Outside[graph.Host]))
		if n := f.Config.LocalRanks; n > 1 {
			text += fmt.Sprintf(", %s a server of %d", plan.Bytes(int64(n)*(host+f.Plan.Config.Outside[graph.Host])), n)
		}
		text += " (Config.HostMemory and Hardware.HostShare cap it)"
	}
	return text
}

// Explanation says what a plan computes again and what it keeps off the device.
type Explanation = search.Explanation

// BufferGroup is buffers that differ by their layer alone.
type BufferGroup = search.BufferGroup

// ClassPlace is where a class of units' buffers rests, in part.
type ClassPlace = search.ClassPlace

// Explain reads a forecast's program; of no forecast it has nothing to say.
func Explain(f *Forecast) Explanation {
	if f == nil {
		return Explanation{}
	}
	return search.Explain(f.Plan, f.Step)
}

// Is puts the error among the kinds.
func (e *NothingFits) Is(target error) bool { return target == plan.ErrDoesNotFit }
