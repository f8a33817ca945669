package bench

import (
	"github.com/spillway-ml/spillway/graph"
	page "github.com/spillway-ml/spillway/memplan/report"
)

// memoryChart draws device memory at the peak, by class, a bar a configuration.
func (r *report) memoryChart() *page.Bars {
	chart := &page.Bars{Title: "Device memory of a rank at its peak", Note: r.what, Series: page.Classes()}
	for _, row := range r.rows() {
		var classes [graph.NumClasses]int64
		for class := range graph.NumClasses {
			classes[class] = row.ByClass[class.String()]
		}
		bar := page.MemoryBar(row.Name, classes, r.capacity)
		if bar.Mark > 0 {
			chart.Mark = "cap"
		}
		chart.Bars = append(chart.Bars, bar)
	}
	return chart
}
