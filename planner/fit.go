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
	Choices Settings // the search's choices; a request with these values has the same plan
	Reasons []string // a line each: what bounds the plan, its costs, the runners-up, other stages
	Tried   int      // number of configurations planned
	// Caps are the caps that the machine's memory adds to the request, by space; 0: none.
	Caps [graph.NumSpaces]int64
}

// NothingFits is the error of a search that found no configuration within the
// caps.
type NothingFits struct {
	Tried    int
	Smallest *Forecast // the tried plan nearest to the caps; nil: nothing could be planned
	Choices  Settings  // of Smallest
	What     string    // the fields that the search could change
	// HostShare is the assumed cap on host memory; 0: none was assumed.
	HostShare int64
	// Machine describes the main memory that holds a rank's device and host arenas, if it limited
	// the search; "" otherwise.
	Machine string
	// Spent is set if the Hardware's Budget ended the search.
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

// WithWays adds to the error changes beyond the search's freedom that make the configuration fit,
// such as smaller micro-batches, other precisions or more ranks. It returns e if it finds none.
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

// Fixed lists the fields of a Config that a search does not change.
type Fixed struct {
	Zero, Prefetch, Batch, Accum, AccumOrder, Precision, Recompute, Offload bool
}

// Fit chooses the fields that are not fixed so that cfg fits and is predicted to be fastest on hw.
// It is deterministic. If nothing fits, the error is a *NothingFits.
//
// Batch and Accum change only if rows is set, the number of rows of a step over all ranks; 0 keeps
// those of cfg. cfg.Allow adds precisions to choose from. Disk is used only if cfg has a folder for
// it.
//
// Activations are recomputed or offloaded by kind and layer, and the units' states leave the device
// in shares. Those that free the most bytes per second lost go first.
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

// freed is a request in the form of package search, with the fields that the search must not
// change.
type freed struct {
	planner
	spec    search.Spec
	given   search.Given
	allowed []precision.Precision
	rows    int
}

func (q Request) free(fixed Fixed, rows int, hw Hardware) (*freed, error) {
	if len(q.BatchSchedule) > 0 {
		rows = 0 // the schedule sets the rows of each step
	}
	if q.Reproducible && rows > 0 { // a reproducible run keeps its micro-batch
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

// refusal returns a search's error. For a number of rows it names possible ones.
func (r *freed) refusal(err error) error {
	if odd, ok := errors.AsType[*search.RowsError](err); ok {
		return rowsText(odd, r.Config, r.given.Accum)
	}
	return err
}

// rowsText returns the error for rows of a step that the ranks or the fixed fields do not allow. It
// names possible numbers.
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

// fitted returns the result of a search, with the reasons for it.
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

// Reasons returns one line each about what bounds a plan, what it recomputes and what it offloads.
func Reasons(f *Forecast) []string { return append([]string{bound(f)}, Explain(f).Lines()...) }

// OtherBits says why two configurations of one job differ in the last bits of their results; "" if
// they do not. With accumulation, stages 0 and 1 and layer order add up a step's micro-batches
// before they reduce. Stages 2 and 3 in micro order do so after.
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

// bound describes the time of a plan's step, and the memory space that is fullest.
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

// Explanation lists what a plan recomputes and what it keeps off the device.
type Explanation = search.Explanation

// BufferGroup is a group of buffers that differ only in their layer.
type BufferGroup = search.BufferGroup

// ClassPlace is the memory space in which a part of a class of units' buffers rests.
type ClassPlace = search.ClassPlace

// Explain explains a forecast's plan. For nil the result is empty.
func Explain(f *Forecast) Explanation {
	if f == nil {
		return Explanation{}
	}
	return search.Explain(f.Plan, f.Step)
}

// Is reports whether target is plan.ErrDoesNotFit.
func (e *NothingFits) Is(target error) bool { return target == plan.ErrDoesNotFit }
