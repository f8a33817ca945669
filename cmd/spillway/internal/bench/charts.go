package bench

import (
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/graph"
	page "github.com/spillway-ml/spillway/memplan/report"
	"github.com/spillway-ml/spillway/planner"
)

// ran returns the rows with measurements.
func (r *report) ran() (list []*Row) {
	for _, row := range r.rows() {
		if row.Missing == "" {
			list = append(list, row)
		}
	}
	return list
}

// memoryChart draws device memory at the peak by class, with a bar for each configuration.
func (r *report) memoryChart() *page.Bars {
	chart := &page.Bars{Title: "Device memory of a rank at its peak", Note: r.what, Series: page.Classes()}
	for _, row := range r.rows() {
		var classes [graph.NumClasses]int64
		for class := range graph.NumClasses {
			classes[class] = row.ByClass[class.String()]
		}
		if row.PlannedBytes == 0 { // not known
			continue
		}
		bar := page.MemoryBar(row.Name, classes, r.capacity)
		if bar.Mark > 0 {
			chart.Mark = "cap"
		}
		chart.Bars = append(chart.Bars, bar)
	}
	return chart
}

func seconds(v float64) string { return digits(v) + " s" }

// timeChart draws the parts of a step's time and the prediction.
func (r *report) timeChart() *page.Bars {
	chart := &page.Bars{Title: "Time of a step", Text: seconds, Series: []page.Series{{Name: "computing", Colour: "#0072b2"}, {Name: "communication", Colour: "#d55e00"}, {Name: "data", Colour: "#e69f00"}},
		Note: "Communication: only where the rank computes nothing meanwhile; waiting for other ranks is part of it."}
	for _, row := range r.ran() {
		bar := page.Bar{Name: row.Name, Values: []float64{max(0, row.StepSecondsMedian-row.Exposed-row.DataWait), row.Exposed, row.DataWait}}
		if row.Predicted != nil {
			chart.Mark, bar.Mark = "predicted", *row.Predicted
		}
		chart.Bars = append(chart.Bars, bar)
	}
	return chart
}

// sentChart draws the bytes that a rank sends in a step, by collective, and the theory.
func (r *report) sentChart() *page.Bars {
	chart := &page.Bars{Title: "Sent by a rank in a step", Mark: "theory", Series: []page.Series{{Name: "all-gather", Colour: "#56b4e9"}, {Name: "reduce-scatter", Colour: "#d55e00"}, {Name: "all-reduce", Colour: "#009e73"}, {Name: "all-to-all", Colour: "#cc79a7"}}}
	for _, row := range r.ran() {
		if row.Sent == nil {
			continue
		}
		bar := page.Bar{Name: row.Name, Mark: float64(row.TextbookBytes)}
		for _, op := range []graph.Kind{graph.AllGather, graph.ReduceScatter, graph.AllReduce, graph.AllToAll} {
			bar.Values = append(bar.Values, float64(row.Sent[string(op)]))
		}
		chart.Bars = append(chart.Bars, bar)
	}
	return chart
}

func zeroCharts(r *report) []*page.Bars {
	return []*page.Bars{r.memoryChart(), r.timeChart(), r.sentChart()}
}

// page returns the report as a page.
func (r *report) page() *page.Page {
	doc := &page.Page{Title: r.title, Subtitle: strings.Join(r.heading(), "; "), Lines: r.remarks(), Made: planner.Shell(r.made),
		By: fmt.Sprintf("spillway %s, on %s", cli.VersionText(), r.machine.Day)}
	for _, chart := range r.charts(r) {
		if len(chart.Bars) > 0 {
			doc.Charts = append(doc.Charts, chart)
		}
	}
	if r.compared != nil && len(r.compared.changes) > 0 {
		doc.Tables = append(doc.Tables, r.compared.table())
	}
	for i := range r.tables {
		title, cells := r.tables[i].cells(r.ran()) // the remarks say why others are missing
		doc.Tables = append(doc.Tables, page.Table{Title: title, Note: r.tables[i].note, Mark: -1, Head: cells[0], Rows: cells[1:]})
	}
	return doc
}
