package planning

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/graph"
	page "github.com/spillway-ml/spillway/memplan/report"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
)

// pageBytes is the largest size of the HTML page that --html writes, in bytes.
const pageBytes = 200_000

// html returns the report as one page, with the finest charts that fit into pageBytes.
func (r *planReport) html() (text []byte, err error) {
	for columns := page.Columns; ; columns /= 2 {
		text, err = r.page(columns)
		if err != nil || len(text) <= pageBytes || columns < 20 {
			return text, err
		}
	}
}

// writePage writes the page to --html and passes it to f.page.
func (r *planReport) writePage() error {
	f := r.flags
	if f.htmlPath == "" && f.page == nil {
		return nil
	}
	text, err := r.html()
	if err == nil && f.htmlPath != "" {
		err = cli.WriteNew(f.htmlPath, text)
	}
	if err == nil && f.page != nil {
		err = f.page(text)
	}
	return err
}

func (r *planReport) page(columns int) ([]byte, error) {
	var head bytes.Buffer
	r.heading(&head)
	// A wrapped line is one line.
	lines := strings.Split(strings.ReplaceAll(strings.TrimSpace(head.String()), "\n  ", " "), "\n")
	a, _ := r.answer()
	if budget := r.flags.budgetText(r.asked); a == nil && budget != "" {
		lines = append(lines, budget)
	}
	doc := page.Page{Title: "Plan of " + r.asked.Config.Model, Subtitle: strings.Join(lines, "; "),
		Fits: r.asked.Fits, Verdict: r.fit(),
		Made: planner.Shell(append([]string{"spillway"}, r.flags.asked()...)),
		By:   fmt.Sprintf("spillway %s, on %s", cli.VersionText(), time.Now().UTC().Format(time.DateOnly))}
	for s := range graph.NumSpaces {
		if r.asked.Plan.Layout.Spaces[s].Peak > 0 {
			doc.Tables = append(doc.Tables, r.spaceTable(s))
			doc.Peak = append(doc.Peak, r.peakTable(s))
		}
	}
	doc.Charts = []*page.Bars{r.stageChart(a)}
	var err error
	if doc.Spaces, err = r.charts(a, columns); err != nil {
		return nil, err
	}
	doc.Tables = append(doc.Tables, r.stepTable())
	if list := r.pipeline(); len(list) > 0 {
		t := page.Table{Title: "Stages of the pipeline", Mark: -1, Head: roleHead}
		for _, role := range list {
			t.Rows = append(t.Rows, r.roleRow(role))
		}
		doc.Tables = append(doc.Tables, t)
	}
	ref, err := r.reference()
	if err != nil {
		return nil, err
	}
	if ref != nil {
		doc.Tables = append(doc.Tables, ref.table())
	}
	doc.Advice = r.advice(a)
	for _, list := range r.wayLists() {
		doc.Ways = append(doc.Ways, r.waysTable(list))
	}
	if len(r.ways) == 0 && !r.asked.Fits {
		doc.NoWay = r.nothing()
	}
	var out bytes.Buffer
	err = doc.HTML(&out)
	return out.Bytes(), err
}

// compared returns the plans that a page compares, the answer first, and their names.
func (r *planReport) compared(a *answer) (plans []*planner.Forecast, names []string) {
	if a != nil && a.changes != nil {
		plans, names = append(plans, a.plan), append(names, "recommended")
	}
	if a == nil || !r.flags.chosen {
		plans, names = append(plans, r.asked), append(names, "as requested")
	}
	return plans, names
}

// advice returns the answer for the page; nil: nothing fits.
func (r *planReport) advice(a *answer) *page.Advice {
	if a == nil {
		return nil
	}
	out := &page.Advice{Title: "Recommended", Flags: planner.Shell(a.changes)}
	var refused error
	if out.Command, refused = r.flags.command(&a.plan.Config, a.changes); refused != nil {
		out.Lines = []string{"planned only: " + cli.Flagged(refused.Error())}
	}
	out.Lines = append(out.Lines, r.refusedHere(a))
	budget := r.flags.budgetText(a.plan)
	rec := r.recommended()
	switch {
	case rec != nil:
		out.Words, out.Lines = rec.words, slices.Concat(out.Lines, []string{rec.took, budget}, rec.lines)
	case r.asked.Fits:
		out.Title = "As requested"
	default:
		out.Title = "What fits, for " + r.ways[0].Cost
	}
	if rec == nil {
		out.Lines = append(out.Lines, budget)
	}
	out.Lines = slices.DeleteFunc(out.Lines, func(line string) bool { return line == "" })
	plans, names := r.compared(a)
	out.Beside = &page.Table{Mark: -1, Head: append([]string{""}, names...)}
	for _, f := range r.figureRows(plans) {
		row := []string{f.name}
		for _, p := range plans {
			row = append(row, f.cell(p))
		}
		out.Beside.Rows = append(out.Beside.Rows, row)
	}
	return out
}

// charts returns the timelines of the compared plans by space. It leaves out spaces that are small
// compared with the largest.
func (r *planReport) charts(a *answer, columns int) (list []page.SpaceChart, err error) {
	plans, names := r.compared(a)
	var most [graph.NumSpaces]int64
	for _, p := range plans {
		for s := range graph.NumSpaces {
			most[s] = max(most[s], p.Plan.Layout.Spaces[s].Peak)
		}
	}
	for s := range graph.NumSpaces {
		for i, p := range plans {
			if p.Plan.Layout.Spaces[s].Peak == 0 || most[s] < slices.Max(most[:])/50 {
				continue
			}
			charts, err := spaceCharts(p, s, columns)
			if err != nil {
				return nil, err
			}
			for _, c := range charts {
				c.Of = names[i]
				list = append(list, c)
			}
		}
	}
	return list, nil
}

// spaceCharts returns the timelines of a space: of the step, and of the section with the peak if
// the step does not reach it.
func spaceCharts(p *planner.Forecast, s graph.Space, columns int) (list []page.SpaceChart, err error) {
	role := p.Plan.Largest(graph.Device)
	use := &role.Layout.Spaces[s]
	sections := []string{"step"}
	if at, _, ok := strings.Cut(use.PeakAt, "/"); ok && at != "step" {
		sections = append(sections, at)
	}
	for _, name := range sections {
		t, err := page.NewTimeline(role.Program, role.Layout, name, s, columns)
		if err != nil {
			return nil, err
		}
		if len(t.Columns) == 0 {
			continue
		}
		chart := page.SpaceChart{Timeline: t}
		if limit := p.Plan.Config.Capacity[s]; limit > 0 {
			chart.Capacity = limit - p.Plan.Config.Outside[s]
		}
		list = append(list, chart)
		if t.Columns[t.Peak].Total >= use.LowerBound {
			break // the step reaches the peak too
		}
	}
	return list, nil
}

// stageChart draws the device memory of the answer, and of the request at each stage, with the cap.
func (r *planReport) stageChart(a *answer) *page.Bars {
	chart := &page.Bars{Title: "Device memory of a rank at its peak", Series: page.Classes()}
	add := func(name string, f *planner.Forecast) {
		limit := f.Plan.Config.Capacity[graph.Device]
		if limit > 0 {
			limit -= f.Plan.Config.Outside[graph.Device]
		}
		bar := page.MemoryBar(name, f.Plan.Layout.Spaces[graph.Device].ByClass, limit)
		if bar.Mark > 0 {
			chart.Mark = "cap"
		}
		chart.Bars = append(chart.Bars, bar)
	}
	if a != nil && a.changes != nil && !r.flags.chosen {
		add("recommended", a.plan)
	}
	for _, f := range r.shown() {
		name := fmt.Sprintf("ZeRO-%d", f.Config.Zero)
		if f == r.asked {
			name += ", as requested"
		}
		add(name, f)
	}
	return chart
}

// fit describes whether the request fits, and by how much.
func (r *planReport) fit() string {
	if refused, ok := errors.AsType[*plan.DoesNotFit](r.asked.Plan.Fit()); ok {
		return fmt.Sprintf("Does not fit: %s of %s memory over the cap",
			plan.Bytes(refused.Peak+refused.Outside-refused.Capacity), refused.Space)
	}
	use, limit := r.asked.Plan.Layout.Spaces[graph.Device].Peak, r.asked.Plan.Config.Capacity[graph.Device]
	if limit == 0 {
		return fmt.Sprintf("A rank needs %s of device memory; no cap was given", plan.Bytes(use))
	}
	return fmt.Sprintf("Fits: %s of device memory stay free",
		plan.Bytes(limit-use-r.asked.Plan.Config.Outside[graph.Device]))
}

// byStage returns a table with a column for each stage, narrow enough for paper.
func (r *planReport) byStage(title string) page.Table {
	t := page.Table{Title: title, Mark: -1, Head: []string{"ZeRO"}}
	for i, f := range r.shown() {
		t.Head = append(t.Head, fmt.Sprint(f.Config.Zero))
		if f == r.asked {
			t.MarkColumn = i + 1
		}
	}
	return t
}

func (r *planReport) addRow(t *page.Table, name string, cell func(*planner.Forecast) string) {
	row := []string{name}
	for _, f := range r.shown() {
		row = append(row, cell(f))
	}
	t.Rows = append(t.Rows, row)
}

func (r *planReport) spaceTable(s graph.Space) page.Table {
	t := r.byStage(fmt.Sprintf("%s memory of a rank at its peak, by stage", s))
	if r.asked.Plan.Config.Outside[s] > 0 {
		t.Note = "Outside the arena: " + r.outsideNote(s) + "."
	}
	for c := range graph.NumClasses {
		has := func(f *planner.Forecast) bool { return f.Plan.Layout.Spaces[s].ByClass[c] > 0 }
		if !slices.ContainsFunc(r.shown(), has) {
			continue
		}
		r.addRow(&t, c.String(), func(f *planner.Forecast) string {
			return plan.Bytes(f.Plan.Layout.Spaces[s].ByClass[c])
		})
	}
	r.addRow(&t, "peak", func(f *planner.Forecast) string { return plan.Bytes(f.Plan.Layout.Spaces[s].Peak) })
	r.addRow(&t, "outside", func(f *planner.Forecast) string { return plan.Bytes(f.Plan.Config.Outside[s]) })
	if n := r.flags.ranksAServer(&r.asked.Config); s == graph.Host && n > 1 {
		r.addRow(&t, fmt.Sprintf("%d, a server", n),
			func(f *planner.Forecast) string { return plan.Bytes(r.flags.onServer(f, s)) })
		if note := r.flags.serverNote(r.asked); note != "" {
			t.Note = strings.TrimSpace(t.Note + " " + strings.ToUpper(note[:1]) + note[1:] + ".")
		}
	}
	r.addRow(&t, "fits", func(f *planner.Forecast) string {
		use, cfg := &f.Plan.Layout.Spaces[s], &f.Plan.Config
		if limit := cfg.Capacity[s]; limit > 0 && use.Peak+cfg.Outside[s] > limit {
			return "no, " + plan.Bytes(use.Peak+cfg.Outside[s]-limit) + " over"
		}
		return "yes"
	})
	return t
}

func (r *planReport) stepTable() page.Table {
	t := r.byStage("A step, predicted, by stage")
	r.addRow(&t, "sent by a rank", func(f *planner.Forecast) string { return plan.Bytes(f.Plan.CommBytes) })
	for _, row := range r.stepRows() {
		r.addRow(&t, row.name, row.cell)
	}
	if within := r.flags.timeRange(r.asked); within != nil {
		t.Note = "From the GPU's rates: " + within.Text() + ", and times are that range. " + r.flags.elsewhere(r.asked)
	}
	r.addRow(&t, "device memory is highest at",
		func(f *planner.Forecast) string { return f.Plan.Layout.Spaces[graph.Device].PeakAt })
	return t
}

func (r *planReport) peakTable(s graph.Space) page.Table {
	use := &r.asked.Plan.Layout.Spaces[s]
	t := page.Table{Title: fmt.Sprintf("The peak of %s memory explained", s), Mark: -1,
		Head: []string{"bytes", "class", "buffer", "type and shape", "of each"},
		Note: fmt.Sprintf("At %s, %s are alive and the arena's extent is %s. Buffers that differ by layer alone are "+
			"one line.", use.PeakAt, plan.Bytes(use.LowerBound), plan.Bytes(use.Peak))}
	for i, e := range aliveRows(r.asked.Plan, s) {
		if i == 40 {
			break
		}
		t.Rows = append(t.Rows, []string{plan.Bytes(e.bytes), e.class.String(), e.name, shapeText(e.shape, e.dtype),
			e.each()})
	}
	return t
}

func (r *planReport) waysTable(list wayList) page.Table {
	t := page.Table{Title: list.title, Note: "The cheapest first; each was planned, and fits.", Mark: -1,
		Head: []string{"device memory", "step", "time of a token", "sent by a rank", "costs"}}
	for _, way := range list.ways {
		t.Above = append(t.Above, cli.FlagText(way.Changes))
		p := way.Forecast
		t.Rows = append(t.Rows, []string{plan.Bytes(p.Plan.Layout.Spaces[graph.Device].Peak), r.flags.step(p),
			fmt.Sprintf("%.2f ×", way.Slowdown), plan.Bytes(p.Plan.CommBytes), way.Cost})
	}
	return t
}
