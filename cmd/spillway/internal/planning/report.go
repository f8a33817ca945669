package planning

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
)

// planReport is the result of a plan, from which all outputs are written.
type planReport struct {
	flags  *Flags
	stages []*planner.Forecast
	asked  *planner.Forecast
	ways   []planner.Way
	order  *planner.OrderCost // nil without --reproducible
	best   *planner.Fitted    // nil without --fit
	noWay  *planner.NoWay     // set if there are no ways
}

// answer is the recommended configuration.
type answer struct {
	plan    *planner.Forecast
	changes []string     // pairs "--name", "value" that replace the request's; nil: the request itself
	way     *planner.Way // set if the answer is a way out
}

// answer returns the recommended configuration and a sentence that compares it with the request;
// nil: nothing fits.
func (r *planReport) answer() (a *answer, says string) {
	asked, best := r.asked, r.best
	over := ""
	if refused, ok := errors.AsType[*plan.DoesNotFit](asked.Plan.Fit()); ok {
		over = fmt.Sprintf("does not fit as requested (%s of %s memory over the cap)",
			plan.Bytes(refused.Peak+refused.Outside-refused.Capacity), refused.Space)
	}
	switch {
	case r.flags.chosen:
		a := &answer{plan: best.Forecast, changes: cli.ArgsOf(best.Choices)}
		if r.flags.answer != nil { // the request has no flag for the value
			a.changes = append(slices.Clone(r.flags.answer.given), a.changes...)
		}
		return a, fmt.Sprintf("fits; the fastest by prediction of %d configurations planned:", best.Tried)
	case asked.Fits && best == nil: // the effort was used up
		return &answer{plan: asked}, "fits as requested; nothing else was planned:"
	case asked.Fits && best.TokensPerSecond() < sameSpeed*asked.TokensPerSecond():
		return &answer{plan: asked}, "fits as requested, and nothing found is faster:"
	case asked.Fits:
		return &answer{plan: best.Forecast, changes: cli.ArgsOf(best.Choices)}, fmt.Sprintf("fits as requested; "+
			"this is %.2f × as fast:", best.TokensPerSecond()/asked.TokensPerSecond())
	case best != nil:
		return &answer{plan: best.Forecast, changes: cli.ArgsOf(best.Choices)}, over + "; this fits:"
	case len(r.ways) > 0:
		way := &r.ways[0]
		return &answer{way.Forecast, cli.ArgsOf(way.Changes), way}, fmt.Sprintf("%s; this fits, for %s:", over,
			cmp.Or(way.Cost, "another time"))
	}
	return nil, over + "; nothing tried makes it fit, see the end"
}

// otherNumbers is the cost of a way out that changes the results.
const otherNumbers = "other numbers"

// sameSpeed is the ratio of speeds below which two plans count as equally fast.
const sameSpeed = 1.005

// shown returns the stages that have columns in tables: on one rank all are the same.
func (r *planReport) shown() []*planner.Forecast {
	if r.asked.Config.Ranks == 1 {
		return []*planner.Forecast{r.asked}
	}
	return r.stages
}

// pipeline returns the stages of the requested plan's pipeline; nil: it has no pipeline.
func (r *planReport) pipeline() (list []planRole) {
	p := r.asked.Plan
	if len(p.Roles) == 1 {
		return nil
	}
	for i, run := range r.asked.Stages {
		last := r.asked.Shape().Layers - 1
		if i+1 < len(p.Config.Stages) {
			last = p.Config.Stages[i+1] - 1
		}
		list = append(list, planRole{i, p.Config.Stages[i], last, p.Roles[i].Layout.Spaces[graph.Device].Peak,
			p.Roles[i].CommBytes, run.Busy[graph.Compute], run.Exposed / run.Seconds})
	}
	return list
}

var roleHead = []string{"stage", "layers", "device", "sent by a rank", "computing", "waiting"}

func (r *planReport) roleRow(p planRole) []string {
	return []string{fmt.Sprint(p.Stage), fmt.Sprintf("%d-%d", p.FirstLayer, p.LastLayer), plan.Bytes(p.DeviceBytes),
		plan.Bytes(p.CommBytesPerStep), r.flags.seconds(r.asked, p.ComputingSeconds),
		fmt.Sprintf("%.0f %%", 100*p.WaitingShare)}
}

// stepRow is a line of the table of times.
type stepRow struct {
	name string
	cell func(*planner.Forecast) string
}

// stepRows returns the lines about the step's time, on a GPU as a range with shares of computing
// and waiting.
func (r *planReport) stepRows() []stepRow {
	f := r.flags
	if f.gpuFound == nil {
		return []stepRow{
			{"time", func(p *planner.Forecast) string { return seconds(p.Step.Seconds) }},
			{"computing", func(p *planner.Forecast) string { return seconds(p.Step.Seconds - p.Step.Exposed) }},
			{"waiting", func(p *planner.Forecast) string { return seconds(p.Step.Exposed) }},
			{"tokens/s", func(p *planner.Forecast) string { return cli.Count(p.TokensPerSecond()) }},
		}
	}
	return []stepRow{
		{"time", func(p *planner.Forecast) string { return f.step(p) }},
		{"computing", func(p *planner.Forecast) string {
			return fmt.Sprintf("%.0f %%", 100*(1-p.Step.Exposed/p.Step.Seconds))
		}},
		{"waiting", func(p *planner.Forecast) string {
			return fmt.Sprintf("%.0f %%", 100*p.Step.Exposed/p.Step.Seconds)
		}},
		{"tokens/s", func(p *planner.Forecast) string {
			return strings.TrimSuffix(f.speed(p), " tokens/s")
		}},
	}
}

// figureRows returns the lines of the verdict's table and of the page's.
func (r *planReport) figureRows(plans []*planner.Forecast) (rows []stepRow) {
	for s := range graph.NumSpaces {
		used := s != graph.Disk
		for _, p := range plans {
			used = used || p.Plan.Layout.Spaces[s].Peak > 0
		}
		if used {
			rows = append(rows, stepRow{s.String() + " memory",
				func(p *planner.Forecast) string { return r.flags.filled(p, s) }})
		}
	}
	return append(rows,
		stepRow{"step", func(p *planner.Forecast) string { return r.flags.step(p) }},
		stepRow{"tokens/s", func(p *planner.Forecast) string {
			return strings.TrimSuffix(r.flags.speed(p), " tokens/s")
		}})
}

// filled formats a rank's use of a space, and its limit.
func (f *Flags) filled(p *planner.Forecast, s graph.Space) string {
	text, limit := plan.Bytes(p.Plan.Layout.Spaces[s].Peak+p.Plan.Config.Outside[s]), p.Plan.Config.Capacity[s]
	if limit == 0 && s == graph.Host && f.gpuFound != nil {
		limit = f.hostShare(*f.gpuFound) // of the assumed server
	}
	if limit == 0 {
		return text
	}
	return text + " of " + plan.Bytes(limit)
}

// outsideNote describes the memory outside the arena of a space and how it is known.
func (r *planReport) outsideNote(s graph.Space) string {
	switch {
	case s == graph.Device:
		return "the GPU's context and libraries; an estimate for its generation"
	case r.flags.gpuFound != nil:
		return "code, heap, queues and the driver's part; an estimate"
	}
	return "code, heap and queues of the process, a rank's part; measured"
}

var digits = regexp.MustCompile(`[0-9]+`)

// aliveRow is a buffer that is alive at the peak, or several that differ only in their layer.
type aliveRow struct {
	name       string
	class      graph.Class
	count      int
	one, bytes int64
	shape      []int64
	dtype      graph.DType
}

func (e *aliveRow) each() string {
	if e.count == 1 {
		return ""
	}
	return fmt.Sprintf("%d × %s", e.count, plan.Bytes(e.one))
}

// aliveRows returns the buffers alive at the peak of a space, the largest first.
func aliveRows(p *plan.Plan, s graph.Space) []*aliveRow {
	rows := map[string]*aliveRow{}
	var list []*aliveRow
	role := p.Largest(s)
	for _, id := range role.Layout.Spaces[s].Live {
		b := role.Program.Buf(id)
		key := fmt.Sprint(digits.ReplaceAllString(b.Name, "*"), b.Class, b.Bytes())
		e := rows[key]
		if e == nil {
			e = &aliveRow{name: b.Name, class: b.Class, one: b.Bytes(), shape: b.Shape, dtype: b.DType}
			rows[key] = e
			list = append(list, e)
		}
		if e.count++; e.count == 2 {
			e.name = digits.ReplaceAllString(b.Name, "*")
		}
		e.bytes += b.Bytes()
	}
	slices.SortStableFunc(list, func(a, b *aliveRow) int { return cmp.Compare(b.bytes, a.bytes) })
	return list
}

func shapeText(shape []int64, d graph.DType) string {
	var parts []string
	for _, n := range shape {
		parts = append(parts, fmt.Sprint(n))
	}
	return d.String() + "(" + strings.Join(parts, ", ") + ")"
}

// wayList is a list of ways out of one kind; changes: they change the results.
type wayList struct {
	title   string
	changes bool
	ways    []planner.Way
}

// wayLists returns the changes with which the run would fit: those that keep its losses, and those
// that alter them. All keep the mesh.
func (r *planReport) wayLists() (lists []wayList) {
	title := "What would make it fit"
	if r.onMesh() {
		title += " on the same --tensor and --pipeline"
	}
	for _, l := range []wayList{{title: title}, {title: title + " and changes the results", changes: true}} {
		for _, way := range r.ways {
			if (way.Cost == otherNumbers) == l.changes {
				l.ways = append(l.ways, way)
			}
		}
		if len(l.ways) > 0 {
			lists = append(lists, l)
		}
	}
	return lists
}

// onMesh reports whether layers are divided over ranks.
func (r *planReport) onMesh() bool {
	return r.asked.Config.Tensor > 1 || r.asked.Config.Pipelined()
}

// nothing returns the text for a search without a way out.
func (r *planReport) nothing() string {
	text := cli.Flagged(r.noWay.String())
	if r.noWay.Spent {
		text += " A larger --effort looks further."
	}
	if r.onMesh() {
		text += " All had the same --tensor and --pipeline."
	}
	return text
}
