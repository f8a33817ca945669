package planner

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/search"
)

// Forecast is the plan of a run with its predicted time.
type Forecast struct {
	Config config.Config // with the model's defaults filled in
	Plan   *plan.Plan
	Step   *cost.Run // of section "step"; in a pipeline, of the stage that ends last
	// Stages are the runs of a pipeline's stages.
	Stages []*cost.Run
	Fits   bool
	// Auto describes the choice of recompute auto; "" if it was not asked for.
	Auto string

	of    planner
	found *search.Forecast
}

// Predict plans what cfg describes and predicts the time of a step on machine. It reads no weights
// and no data, and needs no device. A plan that does not fit is not an error.
func Predict(ctx context.Context, cfg config.Config, machine *cost.Machine) (*Forecast, error) {
	return Request{Config: cfg}.Predict(ctx, machine)
}

func (q Request) Predict(ctx context.Context, machine *cost.Machine) (*Forecast, error) {
	r, err := q.resolve()
	if err != nil {
		return nil, err
	}
	s, err := r.spec(machine)
	if err != nil {
		return nil, err
	}
	f, err := search.Predict(ctx, s, machine)
	if err != nil {
		return nil, err
	}
	return r.staged(f)
}

// staged is forecast for a plan that will run: it adds the memory for saving checkpoints.
func (r planner) staged(f *search.Forecast) (*Forecast, error) {
	out := r.forecast(f)
	err := stage(&out.Config, out.Plan)
	out.Fits = out.Plan.Fit() == nil
	return out, err
}

// forecast converts a search's forecast of a configuration; nil gives nil.
func (r planner) forecast(f *search.Forecast) *Forecast {
	if f == nil {
		return nil
	}
	return &Forecast{Config: r.with(&f.Spec), Auto: AutoText(f.Chosen), Plan: f.Plan, Step: f.Step, Stages: f.Stages, Fits: f.Fits(), of: r, found: f}
}

// newDisk is the folder that a way out proposes for a disk tier.
const newDisk = "spillway-disk"

// with returns the configuration with a search's choices. Fields that the search did not change
// keep their spelling.
func (r *Resolved) with(s *search.Spec) config.Config {
	c := r.Request
	c.Ranks, c.ShardSize, c.Zero, c.Batch, c.Seq, c.Accum, c.Prefetch = s.Ranks, s.ShardSize, s.Stage, s.Batch, s.Seq, s.Accum, s.Prefetch
	if c.GlobalBatch > 0 && s.Rows == 0 {
		c.GlobalBatch = c.DataRanks() * s.Batch * s.Accum
	}
	if s.LayerOrder != c.AsksLayers() {
		c.AccumOrder = orderName(s.LayerOrder)
	}
	if text := s.Precision.String(); !strings.EqualFold(c.PrecisionName(), text) {
		c.Precision = text
	}
	if conf, err := c.passes(); err != nil || c.RecomputeAuto() || conf.Recompute.String() != s.Recompute.String() {
		c.Recompute = s.Recompute.String()
	}
	if conf, err := c.passes(); err != nil || conf.Offload.String() != s.Offload.String() {
		c.Offload = s.Offload.String()
	}
	c.DeviceMemory, c.HostMemory, c.DiskMemory = s.Capacity[graph.Device], s.Capacity[graph.Host], s.Capacity[graph.Disk]
	c.Outside[graph.Device] = s.Outside[graph.Device]
	if s.Disk && c.Disk == "" {
		c.Disk = newDisk
	}
	return c.Config
}

// orderName returns the value of Config.AccumOrder.
func orderName(layers bool) string {
	if layers {
		return config.LayerOrder
	}
	return config.MicroOrder
}

// Notes returns lines about settings of the model's configuration that are not applied, and about
// restrictions of the run.
func (f *Forecast) Notes() []string {
	if f.of.Resolved == nil || f.Config.Own.Model != nil {
		return nil
	}
	h := f.of.Shape
	var only []string
	if why := h.Arch().CPUOnly; why != "" && f.Config.DeviceTarget().CUDA.ProductBytes > 0 {
		only = []string{fmt.Sprintf("model_type %s is planned only: train refuses it with Config.Device cuda, since %s", h.Family, why)}
	}
	return slices.Concat(only, DropoutNote(h.Dropouts, &f.Config), config.RingNote(&f.Config), f.epilogueNotes())
}

// DropoutNote notes that the dropout keys of a config.json are not applied. keys lists them, as
// package model does; "" gives no note.
func DropoutNote(keys string, c *config.Config) []string {
	if keys == "" {
		return nil
	}
	return []string{fmt.Sprintf("dropout of the model's config.json (%s) is not applied: Config.Dropout, which is %g, rules", keys, c.Dropout)}
}

// Shape returns the model's shape.
func (f *Forecast) Shape() model.Config { return f.of.Shape }

// Parameters counts the model's parameters, a tied one once.
func (f *Forecast) Parameters() int64 {
	var n int64
	for i := range f.Plan.Program.Tensors() {
		n += f.Plan.Program.Params[i].Elems()
	}
	return n
}

// AccumOrder describes what layer order changes in this plan; "" in micro order.
func (f *Forecast) AccumOrder() string {
	c := &f.Config
	if !c.InLayers() {
		return ""
	}
	text := fmt.Sprintf("layer order: each layer runs its %d micro-batches in turn, and is read and gathered once forward and once backward", c.Accum)
	if own := f.Plan.OwnSums(); own != "" {
		return text + "; " + own
	}
	if c.Reproducible {
		return text + "; bits as in micro order"
	}
	return text + "; bits as of stages 0 and 1 in micro order"
}

// TokensPerSecond returns the predicted speed of all ranks together.
func (f *Forecast) TokensPerSecond() float64 {
	c := &f.Config
	return float64(c.StepRows()) * float64(c.Seq) / f.Step.Seconds
}

// StepTime is the predicted time of a batch schedule's steps with Rows rows.
type StepTime struct {
	Rows, Accum int
	Step        *cost.Run
}

// StepTimes returns the predicted times of the steps of a Config.BatchSchedule, the most rows
// first; nil without one.
func (f *Forecast) StepTimes() (list []StepTime) {
	done := map[int]bool{}
	for _, from := range f.Config.BatchSchedule {
		c := f.Config.At(from.Step)
		sec, repeats := f.Plan.Program.StepOf(graph.FormWhole, graph.StepShape{Rounds: c.Accum, Shares: c.Shares()})
		if done[from.Rows] || sec == nil {
			continue
		}
		done[from.Rows] = true
		if run, err := f.found.Of(sec, repeats); err == nil { // the prediction of the plan had no error
			list = append(list, StepTime{from.Rows, c.Accum, run})
		}
	}
	slices.SortFunc(list, func(a, b StepTime) int { return b.Rows - a.Rows })
	return list
}

// Seconds returns the predicted time of training on the given number of tokens.
func (f *Forecast) Seconds(tokens float64) (seconds float64) {
	c := &f.Config
	times := f.StepTimes()
	for i, from := range c.BatchSchedule {
		at := slices.IndexFunc(times, func(t StepTime) bool { return t.Rows == from.Rows })
		if at < 0 {
			break
		}
		each := float64(from.Rows) * float64(c.Seq)
		steps := tokens / each
		if i+1 < len(c.BatchSchedule) {
			steps = min(steps, float64(c.BatchSchedule[i+1].Step-from.Step))
		}
		tokens -= float64(steps * each)
		seconds += float64(steps * times[at].Step.Seconds)
	}
	return seconds + tokens/f.TokensPerSecond()
}

// Epilogues names the fusions of the plan's 16-bit products on a GPU that change bits; "" if there
// are no such products.
func (f *Forecast) Epilogues() string {
	t := f.Config.DeviceTarget()
	if !f.Config.In16Bits() || t.CUDA.Epilogues == 0 || f.Config.In8Bits("matmul") {
		return ""
	}
	return t.Epilogues(f.Config.EpilogueSet()).String()
}

// epilogueNotes notes that the bits depend on Config.Epilogues, and lists the epilogues in it that
// no product of the run has.
func (f *Forecast) epilogueNotes() (notes []string) {
	c := &f.Config
	if e := c.EpiloguesChosen(); e != "" {
		notes = append(notes, "Config.Epilogues "+e+": the bits of this choice, the same at every stage, and not those of the default")
	}
	for _, e := range graph.EpilogueNames {
		asked := slices.ContainsFunc(c.Epilogues, func(s string) bool { return strings.EqualFold(s, e.Name) })
		if asked && f.Plan != nil && !f.Plan.Program.HasKind(e.Kind) {
			notes = append(notes, "Config.Epilogues "+e.Name+": no product of this run has it, and nothing changes by it")
		}
	}
	return notes
}

// AutoText describes the choice of recompute auto; "" for nil.
func AutoText(c *search.Chosen) string {
	if c == nil {
		return ""
	}
	switch c.Outcome {
	case search.NoCap:
		return "nothing is computed again: there is no cap on device memory (Config.DeviceMemory)"
	case search.Nothing:
		return fmt.Sprintf("nothing needs to be computed again: %s of the cap of %s", plan.Bytes(c.Need), plan.Bytes(c.Capacity))
	case search.NotEnough:
		return "everything is computed again, and that alone does not make it fit"
	case search.Everything:
		return "everything is computed again: with less it does not fit"
	}
	return fmt.Sprintf("%d of %d activations are computed again (%s), for %+.1f %% of the predicted step: Config.Recompute %s", c.Buffers, c.AllBuffers, plan.Bytes(c.Bytes),
		100*(c.Slower-1), quote(c.Recompute.String()))
}

// Shortfall describes what a plan that does not fit needs of every capped space, and the largest
// part of what exceeds a cap.
func Shortfall(f *Forecast) string {
	var parts []string
	for sp := range graph.NumSpaces {
		limit, use := f.Plan.Config.Capacity[sp], &f.Plan.Layout.Spaces[sp]
		if limit == 0 {
			continue
		}
		outside := ""
		if n := f.Plan.Config.Outside[sp]; n > 0 {
			outside = " and " + plan.Bytes(n) + " outside its arena"
		}
		text := fmt.Sprintf("needs %s of %s memory%s of the cap of %s", plan.Bytes(use.Peak), sp, outside, plan.Bytes(limit))
		if use.Peak+f.Plan.Config.Outside[sp] > limit {
			by := most(use.ByClass[:]) + " at " + use.PeakAt
			if n := f.Plan.Config.Outside[sp]; n > use.Peak {
				by = mostOutside(&f.Config, sp, n, f.Plan.Config.Staging)
			}
			text += fmt.Sprintf(" (bound by %s)", by)
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, ", ")
}

// most names the class with the most bytes.
func most(byClass []int64) string {
	best := 0
	for c, n := range byClass {
		if n > byClass[best] {
			best = c
		}
	}
	return fmt.Sprintf("%s of %s", plan.Bytes(byClass[best]), graph.Class(best))
}

// quote quotes a value for a shell.
func quote(v string) string {
	hidden := func(r rune) bool { return r != '\n' && r != '\t' && !unicode.IsPrint(r) }
	if !utf8.ValidString(v) || strings.ContainsFunc(v, hidden) { // a terminal would interpret some of them
		q := strconv.Quote(v)
		return "$'" + strings.ReplaceAll(q[1:len(q)-1], "'", `\'`) + "'"
	}
	if v == "" || strings.ContainsAny(v, "*?[{;&|<>() $`\"\\'\n\t#~!") {
		return "'" + strings.ReplaceAll(v, "'", `'\''`) + "'"
	}
	return v
}
