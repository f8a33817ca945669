package report

import (
	"encoding/xml"
	"fmt"
	"io"
	"strings"

	"github.com/spillway-ml/spillway/graph"
)

// Bars is a chart of memory by class: a bar for each configuration, stacked in
// the order of the classes, with the colours of the timelines.
type Bars struct {
	Title string
	Note  string // a line below the chart; "" for none
	Bars  []Bar
	// Capacity is a cap to draw in bytes; 0, or one of more than three times the
	// highest bar: none.
	Capacity int64
}

// Bar is a configuration's bytes by class. What they sum to is written above.
type Bar struct {
	Name  string
	Bytes [graph.NumClasses]int64
}

func (b *Bar) total() (n int64) {
	for _, v := range b.Bytes {
		n += v
	}
	return n
}

// The chart's coordinates: the legend has a column of its own, right of the
// plot, so that it covers no bar however high.
const (
	barsW, barsH                             = 840, 460
	barsLeft, barsRight, barsTop, barsBottom = 84, 170, 52, 58
	barsPlotW, barsPlotH                     = barsW - barsLeft - barsRight, barsH - barsTop - barsBottom
	legendX                                  = barsLeft + barsPlotW + 24
	widestBar                                = 96
)

// SVG writes the chart as a file of its own, which loads nothing.
func (c *Bars) SVG(w io.Writer) error {
	if len(c.Bars) == 0 {
		return fmt.Errorf("report: chart: there are no bars to draw")
	}
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-label="%s" font-family="sans-serif" font-size="12" fill="#222">`+"\n",
		barsW, barsH, barsW, barsH, escaped(c.Title))
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="#fff"/>`+"\n", barsW, barsH)
	fmt.Fprintf(&b, `<text x="%d" y="26" font-size="16">%s</text>`+"\n", barsLeft, escaped(c.Title))
	limit := c.limit()
	y := func(v int64) float64 { return barsTop + barsPlotH*(1-float64(v)/float64(limit)) }
	for v, step := int64(0), gridStep(limit); v <= limit; v += step {
		fmt.Fprintf(&b, `<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end">%s</text>`+"\n",
			barsLeft, barsLeft+barsPlotW, y(v), y(v), barsLeft-8, y(v)+4, bytes(v))
	}
	slot := float64(barsPlotW) / float64(len(c.Bars))
	width := min(slot*0.6, widestBar)
	for i := range c.Bars {
		bar := &c.Bars[i]
		middle := barsLeft + (float64(i)+0.5)*slot
		sum := int64(0)
		for class := range graph.NumClasses {
			if v := bar.Bytes[class]; v > 0 {
				fmt.Fprintf(&b, `<rect class="bar" x="%.1f" y="%.1f" width="%.1f" height="%.2f" fill="%s"><title>%s, %s: %s</title></rect>`+"\n",
					middle-width/2, y(sum+v), width, y(sum)-y(sum+v), colours[class], escaped(bar.Name), class, bytes(v))
				sum += v
			}
		}
		fmt.Fprintf(&b, `<text x="%.1f" y="%.1f" text-anchor="middle">%s</text><text x="%.1f" y="%d" text-anchor="middle">%s</text>`+"\n",
			middle, y(sum)-6, bytes(sum), middle, barsTop+barsPlotH+20, escaped(bar.Name))
	}
	if c.capShown() {
		fmt.Fprintf(&b, `<line class="cap" x1="%d" x2="%d" y1="%.1f" y2="%.1f" stroke="#b00" stroke-dasharray="6 4"/><text x="%d" y="%.1f" fill="#b00">cap %s</text>`+"\n",
			barsLeft, barsLeft+barsPlotW, y(c.Capacity), y(c.Capacity), legendX, y(c.Capacity)+4, bytes(c.Capacity))
	}
	c.legend(&b)
	if c.Note != "" {
		fmt.Fprintf(&b, `<text x="%d" y="%d" fill="#666">%s</text>`+"\n", barsLeft, barsH-12, escaped(c.Note))
	}
	b.WriteString("</svg>\n")
	if _, err := io.WriteString(w, b.String()); err != nil {
		return fmt.Errorf("report: chart: %w", err)
	}
	return nil
}

// legend names the classes that some bar has, from the bottom as they are
// stacked.
func (c *Bars) legend(b *strings.Builder) {
	row := 0
	for class := range graph.NumClasses {
		used := false
		for i := range c.Bars {
			used = used || c.Bars[i].Bytes[class] > 0
		}
		if !used {
			continue
		}
		at := barsTop + barsPlotH - 14 - 20*row
		fmt.Fprintf(b, `<rect class="legend" x="%d" y="%d" width="14" height="14" fill="%s"/><text x="%d" y="%d">%s</text>`+"\n", legendX, at, colours[class], legendX+20, at+11, class)
		row++
	}
}

func (c *Bars) highest() (n int64) {
	for i := range c.Bars {
		n = max(n, c.Bars[i].total())
	}
	return n
}

func (c *Bars) capShown() bool { return c.Capacity > 0 && c.Capacity < 3*c.highest() }

// limit is the bytes at the top of the plot, with room for a line of text above
// the highest bar.
func (c *Bars) limit() int64 {
	n := max(c.highest(), 1)
	if c.capShown() {
		n = max(n, c.Capacity)
	}
	return n + n/12 + 1
}

// gridStep returns what four to ten lines are apart: 1, 2 or 5 times a power of
// ten in the binary unit of the highest.
func gridStep(limit int64) int64 {
	unit := int64(1)
	for limit/unit >= 4096 {
		unit *= 1024
	}
	for step, k := unit, 0; ; k++ {
		if limit/step <= 10 {
			return step
		}
		if k%3 == 1 {
			step = step / 2 * 5
		} else {
			step *= 2
		}
	}
}

func escaped(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // a strings.Builder takes everything
	return b.String()
}
