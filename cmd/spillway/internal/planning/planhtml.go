package planning

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/graph"
	page "github.com/spillway-ml/spillway/memplan/report"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
)

// html returns the report as one page.
func (r *planReport) html() ([]byte, error) {
	var head bytes.Buffer
	r.heading(&head)
	lines := strings.Split(strings.TrimSpace(head.String()), "\n")
	doc := page.Page{Title: "Plan of " + r.asked.Config.Model, Subtitle: strings.Join(lines, "; "), Fits: r.asked.Fits, Verdict: r.fit(),
		Made: planner.Shell(append([]string{"spillway"}, r.flags.asked()...)),
		By:   fmt.Sprintf("spillway %s, on %s", cli.VersionText(), time.Now().UTC().Format(time.DateOnly))}
	doc.Charts = []*page.Bars{r.stageChart()}
	for s := range graph.NumSpaces {
		use := &r.asked.Plan.Layout.Spaces[s]
		if use.Peak == 0 {
			continue
		}
		sections := []string{"step"}
		if at, _, ok := strings.Cut(use.PeakAt, "/"); ok && at != "step" {
			sections = append(sections, at)
		}
		for k := 0; k < len(sections); k++ {
			name := sections[k]
			t, err := page.NewTimeline(r.asked.Plan.Program, r.asked.Plan.Layout, name, s)
			if err != nil {
				return nil, err
			}
			if len(t.Columns) == 0 {
				continue
			}
			if name == "step" && t.Columns[t.Peak].Total >= use.LowerBound {
				sections = sections[:1] // the step reaches the peak too
			}
			chart := page.SpaceChart{Timeline: t}
			if limit := r.asked.Plan.Config.Capacity[s]; limit > 0 {
				chart.Capacity = limit - r.asked.Plan.Config.Outside[s]
			}
			doc.Spaces = append(doc.Spaces, chart)
		}
		doc.Tables = append(doc.Tables, r.spaceTable(s))
		doc.Peak = append(doc.Peak, r.peakTable(s))
	}
	doc.Tables = append(doc.Tables, r.stepTable())
	ref, err := r.reference()
	if err != nil {
		return nil, err
	}
	if ref != nil {
		doc.Tables = append(doc.Tables, ref.table())
	}
	if rec := r.recommended(); rec != nil {
		doc.Advice = &page.Advice{Flags: rec.flags, Words: rec.words, Lines: rec.all()}
	}
	if len(r.ways) > 0 {
		doc.Ways = r.waysTable()
	} else if !r.asked.Fits {
		doc.NoWay = cli.Flagged(r.noWay.String())
	}
	var out bytes.Buffer
	err = doc.HTML(&out)
	return out.Bytes(), err
}

// stageChart draws each stage's device memory beside the cap.
func (r *planReport) stageChart() *page.Bars {
	chart := &page.Bars{Title: "Device memory of a rank at its peak", Series: page.Classes()}
	for _, f := range r.shown() {
		limit := f.Plan.Config.Capacity[graph.Device]
		if limit > 0 {
			limit -= f.Plan.Config.Outside[graph.Device]
		}
		bar := page.MemoryBar(fmt.Sprintf("ZeRO-%d", f.Config.Zero), f.Plan.Layout.Spaces[graph.Device].ByClass, limit)
		if bar.Mark > 0 {
			chart.Mark = "cap"
		}
		chart.Bars = append(chart.Bars, bar)
	}
	return chart
}

// fit says whether the request fits, and by how much.
func (r *planReport) fit() string {
	var refused *plan.DoesNotFit
	if errors.As(r.asked.Plan.Fit(), &refused) {
		return fmt.Sprintf("Does not fit: %s of %s memory over the cap", plan.Bytes(refused.Peak+refused.Outside-refused.Capacity), refused.Space)
	}
	use, limit := r.asked.Plan.Layout.Spaces[graph.Device].Peak, r.asked.Plan.Config.Capacity[graph.Device]
	if limit == 0 {
		return fmt.Sprintf("A rank needs %s of device memory; no cap was given", plan.Bytes(use))
	}
	return fmt.Sprintf("Fits: %s of device memory stay free", plan.Bytes(limit-use-r.asked.Plan.Config.Outside[graph.Device]))
}

// byStage is a table with a column a stage: narrow enough for paper.
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

func (r *planReport) addRow(t *page.Table, name string, cell func(*spillway.Forecast) string) {
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
		if !slices.ContainsFunc(r.shown(), func(f *spillway.Forecast) bool { return f.Plan.Layout.Spaces[s].ByClass[c] > 0 }) {
			continue
		}
		r.addRow(&t, c.String(), func(f *spillway.Forecast) string { return plan.Bytes(f.Plan.Layout.Spaces[s].ByClass[c]) })
	}
	r.addRow(&t, "peak", func(f *spillway.Forecast) string { return plan.Bytes(f.Plan.Layout.Spaces[s].Peak) })
	r.addRow(&t, "outside", func(f *spillway.Forecast) string { return plan.Bytes(f.Plan.Config.Outside[s]) })
	if n := r.flags.ranksAServer(&r.asked.Config); s == graph.Host && n > 1 {
		r.addRow(&t, fmt.Sprintf("%d, a server", n), func(f *spillway.Forecast) string { return plan.Bytes(r.flags.onServer(f, s)) })
		if note := r.flags.serverNote(r.asked); note != "" {
			t.Note = strings.TrimSpace(t.Note + " " + strings.ToUpper(note[:1]) + note[1:] + ".")
		}
	}
	r.addRow(&t, "fits", func(f *spillway.Forecast) string {
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
	r.addRow(&t, "sent by a rank", func(f *spillway.Forecast) string { return plan.Bytes(f.Plan.CommBytes) })
	for _, row := range r.stepRows() {
		r.addRow(&t, row.name, row.cell)
	}
	if within := r.flags.timeRange(); within != nil {
		t.Note = "From the GPU's rates: " + within.Text() + ", and times are that range. " + r.flags.elsewhere(r.asked)
	}
	r.addRow(&t, "device memory is highest at", func(f *spillway.Forecast) string { return f.Plan.Layout.Spaces[graph.Device].PeakAt })
	return t
}

func (r *planReport) peakTable(s graph.Space) page.Table {
	use := &r.asked.Plan.Layout.Spaces[s]
	t := page.Table{Title: fmt.Sprintf("The peak of %s memory explained", s), Mark: -1, Head: []string{"bytes", "class", "buffer", "type and shape", "of each"},
		Note: fmt.Sprintf("At %s, %s are alive and the arena's extent is %s. Buffers that differ by layer alone are one line.", use.PeakAt, plan.Bytes(use.LowerBound), plan.Bytes(use.Peak))}
	for i, e := range aliveRows(r.asked.Plan, s) {
		if i == 40 {
			break
		}
		t.Rows = append(t.Rows, []string{plan.Bytes(e.bytes), e.class.String(), e.name, shapeText(e.shape, e.dtype), e.each()})
	}
	return t
}

func (r *planReport) waysTable() *page.Table {
	t := &page.Table{Title: "What would make it fit", Note: "The cheapest first; each was planned, and fits.", Mark: -1,
		Head: []string{"device memory", "step", "time of a token", "sent by a rank", "costs"}}
	for _, way := range r.ways {
		t.Above = append(t.Above, cli.FlagText(way.Changes))
		t.Rows = append(t.Rows, []string{plan.Bytes(way.Forecast.Plan.Layout.Spaces[graph.Device].Peak), r.flags.seconds(way.Forecast.Step.Seconds),
			fmt.Sprintf("%.2f ×", way.Slowdown), plan.Bytes(way.Forecast.Plan.CommBytes), way.Cost})
	}
	return t
}
