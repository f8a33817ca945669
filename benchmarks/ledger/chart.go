package main

import (
	"fmt"
	"html"
	"math"
	"os"
	"strings"
)

// window is the steps of a curve's running mean.
const window = 25

// The chart's coordinates: two panels, one above the other, and the names at the right.
const (
	chartW, panelH         = 900, 300
	chartLeft, chartTop    = 70, 46
	panelGap               = 56
	plotW                  = chartW - chartLeft - 190
	chartH                 = chartTop + 2*panelH + panelGap + 60
	shownLoss, shownBehind = 6.0, 0.03 // what is above is drawn at the edge
)

// colours of the rows in the order of rows.
var colours = []string{"#000000", "#0072b2", "#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#8c6d31", "#7f3fbf", "#b00000", "#ff6f91", "#b3476b", "#7a2340", "#555500"}

// panel maps values to a panel's coordinates.
type panel struct {
	top       float64
	low, high float64
	steps     int
}

func (p panel) x(step int) float64 { return chartLeft + plotW*float64(step)/float64(p.steps) }
func (p panel) y(v float64) float64 {
	return p.top + panelH*(1-(min(max(v, p.low), p.high)-p.low)/(p.high-p.low))
}

// drawn writes the chart: running means of the training losses, and by how much they
// are above fp32's on the same samples, both as means over the seeds that a row has.
func drawn(file string, l ledger) error {
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-label="Loss curves by precision" font-family="sans-serif" font-size="12" fill="#222">`+"\n", chartW, chartH, chartW, chartH)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="#fff"/>`+"\n", chartW, chartH)
	losses := panel{top: chartTop, low: 2, high: shownLoss, steps: l.Steps}
	behind := panel{top: chartTop + panelH + panelGap, low: -shownBehind, high: shownBehind, steps: l.Steps}
	losses.grid(&b, fmt.Sprintf("training loss, nats a token (mean over seeds, running over %d steps)", window), 0.5, func(v float64) string { return fmt.Sprintf("%.1f", v) })
	behind.grid(&b, "the same over fp32's of the same seeds, less 1", 0.01, func(v float64) string { return fmt.Sprintf("%+.0f %%", 100*v) })
	for i, r := range rows() {
		curve, over := l.mean(r.name)
		style := `stroke-width="1.4"`
		if r.control != nil || r.seeds < seeds {
			style = `stroke-width="1.4" stroke-dasharray="5 3"`
		}
		losses.line(&b, curve, colours[i], style)
		behind.line(&b, over, colours[i], style)
		y := chartTop + 18*i
		fmt.Fprintf(&b, `<line x1="%d" x2="%d" y1="%d" y2="%d" stroke="%s" %s/><text x="%d" y="%d">%s</text>`+"\n",
			chartLeft+plotW+16, chartLeft+plotW+40, y, y, colours[i], style, chartLeft+plotW+46, y+4, html.EscapeString(r.name))
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d" fill="#666">names of --int8's switches stand for bf16 with them; dashed: faults built in, one seed; beyond a panel: at its edge</text>`+"\n", chartLeft, chartH-12)
	b.WriteString("</svg>\n")
	return os.WriteFile(file, []byte(b.String()), 0o644)
}

func (p panel) grid(b *strings.Builder, title string, step float64, name func(float64) string) {
	fmt.Fprintf(b, `<text x="%d" y="%.0f" font-size="14">%s</text>`+"\n", chartLeft, p.top-10, html.EscapeString(title))
	for i := range int(math.Round((p.high-p.low)/step)) + 1 {
		v := p.low + step*float64(i)
		fmt.Fprintf(b, `<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%s</text>`+"\n",
			chartLeft, chartLeft+plotW, p.y(v), p.y(v), chartLeft-8, p.y(v)+4, name(v))
	}
	for s := 0; s <= p.steps; s += 100 {
		fmt.Fprintf(b, `<text x="%.1f" y="%.1f" text-anchor="middle">%d</text>`+"\n", p.x(s), p.top+panelH+18, s)
	}
}

func (p panel) line(b *strings.Builder, values []float64, colour, style string) {
	var at []string
	for i, v := range values {
		if i >= window && i%5 == 0 {
			at = append(at, fmt.Sprintf("%.1f,%.1f", p.x(i), p.y(v)))
		}
	}
	fmt.Fprintf(b, `<polyline fill="none" stroke="%s" %s points="%s"/>`+"\n", colour, style, strings.Join(at, " "))
}

// mean returns the running means of a row over its seeds, by step, and by how much they
// are above fp32's of the same seeds, up to where the first of its runs ended.
func (l ledger) mean(row string) (mean, over []float64) {
	var sums, base []float64
	n := 0
	for _, c := range l.Runs {
		fp32, ok := l.find("fp32", c.Seed)
		if c.Row != row || !ok {
			continue
		}
		if n++; n == 1 {
			sums, base = make([]float64, len(c.Train)), make([]float64, len(c.Train))
		}
		sums = sums[:min(len(sums), len(c.Train))]
		for i := range sums {
			sums[i] += c.Train[i]
			base[i] += fp32.Train[i]
		}
	}
	var a, b float64
	for i := range sums {
		a, b = a+sums[i], b+base[i]
		if i >= window {
			a, b = a-sums[i-window], b-base[i-window]
		}
		mean = append(mean, a/float64(n*min(i+1, window)))
		over = append(over, a/b-1)
	}
	return mean, over
}
