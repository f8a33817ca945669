package report

import (
	"encoding/xml"
	"fmt"
	"html/template"
	"io"
	"strings"
	"unicode/utf8"

	"github.com/spillway-ml/spillway/graph"
)

// Bars is a chart that compares configurations, with one stacked bar for each. It is an SVG
// that scales, and narrow enough for a phone.
type Bars struct {
	Title  string
	Note   string // below the chart; "" for none
	Series []Series
	Bars   []Bar
	// Mark says what the marks on the bars mean; "": there are no marks.
	Mark string
	// Text formats a value; nil: as bytes.
	Text func(float64) string
}

// Series is a component that the bars share, such as a memory class; bars stack them in order.
type Series struct{ Name, Colour string }

// Bar has a configuration's values by series, and the value at its mark; 0: no mark.
type Bar struct {
	Name   string
	Values []float64
	Mark   float64
}

// Classes returns the memory classes as series, with the colours of the timelines.
func Classes() (list []Series) {
	for class := range graph.NumClasses {
		list = append(list, Series{class.String(), colours[class]})
	}
	return list
}

// MemoryBar is a bar of memory by class. A cap becomes its mark, unless the cap is so large
// that the bar would be hard to see beside it.
func MemoryBar(name string, classes [graph.NumClasses]int64, capacity int64) Bar {
	b := Bar{Name: name}
	for _, v := range classes {
		b.Values = append(b.Values, float64(v))
	}
	if c := float64(capacity); c < 3*b.total() {
		b.Mark = c
	}
	return b
}

func (b *Bar) total() (sum float64) {
	for _, v := range b.Values {
		sum += v
	}
	return sum
}

// The chart's coordinates. Above each bar is a line of text with its name and total.
const (
	barsW                   = 360
	barsTop, barsPitch      = 34, 36
	barHeight               = 14
	legendColumns           = 3
	legendPitch             = 18
	barColumns, noteColumns = 56, 62 // characters of a bar's name and value, and of a line of the note
)

// styleOfFile sets the colours of a standalone SVG, light or dark as the reader prefers. In an
// HTML page the page sets them.
const styleOfFile = `<style>svg{background:#fff}text{fill:#1b1f24}.soft{fill:#57606a}.rest{fill:#d0d7de}.mark{stroke:#1b1f24}@media(prefers-color-scheme:dark){svg{background:#0d1117}text{fill:#e6edf3}.soft{fill:#9198a1}.rest{fill:#3d444d}.mark{stroke:#e6edf3}}</style>`

// SVG writes the chart as a standalone file that loads nothing.
func (c *Bars) SVG(w io.Writer) error {
	if len(c.Bars) == 0 {
		return fmt.Errorf("report: chart: there are no bars to draw; give at least one")
	}
	if _, err := io.WriteString(w, c.draw(true)+"\n"); err != nil {
		return fmt.Errorf("report: chart: %w", err)
	}
	return nil
}

// inline returns the chart for use inside a page.
func (c *Bars) inline() template.HTML { return template.HTML(c.draw(false)) }

func (c *Bars) draw(file bool) string {
	var b strings.Builder
	used, note := c.used(), wrapped(c.Note, noteColumns)
	legend := len(used)
	if c.Mark != "" {
		legend++
	}
	legendTop := barsTop + barsPitch*len(c.Bars) + 12
	noteTop := legendTop + (legend+legendColumns-1)/legendColumns*legendPitch + 6
	height := noteTop + 14*len(note) + 4
	fmt.Fprintf(&b, `<svg class="bars" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" role="img" aria-label="%s" font-family="sans-serif" font-size="11">`, barsW, height, escaped(c.Title))
	if file {
		b.WriteString(styleOfFile)
	}
	fmt.Fprintf(&b, `<text x="4" y="18" font-size="13" font-weight="600">%s</text>`, escaped(c.Title))
	limit := c.limit()
	x := func(v float64) float64 { return 4 + (barsW-8)*v/limit }
	for i := range c.Bars {
		bar := &c.Bars[i]
		y := barsTop + barsPitch*i
		value := c.text(bar.total())
		if bar.Mark > 0 {
			value += fmt.Sprintf(" · %s %s", c.Mark, c.text(bar.Mark))
		}
		name := cut(bar.Name, barColumns-utf8.RuneCountInString(value))
		fmt.Fprintf(&b, `<text x="4" y="%d">%s</text><text x="%d" y="%d" text-anchor="end">%s</text>`,
			y+12, escaped(name), barsW-4, y+12, escaped(value))
		fmt.Fprintf(&b, `<rect x="4" y="%d" width="%d" height="%d" class="rest" opacity="0.35"/>`, y+17, barsW-8, barHeight)
		sum := 0.0
		for k, v := range bar.Values {
			if v > 0 {
				fmt.Fprintf(&b, `<rect class="bar" x="%.2f" y="%d" width="%.2f" height="%d" fill="%s"><title>%s, %s: %s</title></rect>`,
					x(sum), y+17, x(sum+v)-x(sum), barHeight, c.Series[k].Colour, escaped(bar.Name), escaped(c.Series[k].Name), escaped(c.text(v)))
				sum += v
			}
		}
		if bar.Mark > 0 {
			fmt.Fprintf(&b, `<line class="mark" x1="%.2f" x2="%.2f" y1="%d" y2="%d" stroke-width="2"/>`, x(bar.Mark), x(bar.Mark), y+16, y+20+barHeight)
		}
	}
	for k := range legend {
		lx, ly := 4+k%legendColumns*(barsW-8)/legendColumns, legendTop+k/legendColumns*legendPitch
		name := c.Mark
		if k < len(used) {
			name = c.Series[used[k]].Name
			fmt.Fprintf(&b, `<rect class="legend" x="%d" y="%d" width="10" height="10" fill="%s"/>`, lx, ly, c.Series[used[k]].Colour)
		} else {
			fmt.Fprintf(&b, `<line class="mark" x1="%d" x2="%d" y1="%d" y2="%d" stroke-width="2"/>`, lx+5, lx+5, ly-2, ly+12)
		}
		fmt.Fprintf(&b, `<text x="%d" y="%d">%s</text>`, lx+15, ly+9, escaped(name))
	}
	for i, line := range note {
		fmt.Fprintf(&b, `<text x="4" y="%d" font-size="10" class="soft">%s</text>`, noteTop+10+14*i, escaped(line))
	}
	b.WriteString("</svg>")
	return b.String()
}

func (c *Bars) text(v float64) string {
	if c.Text == nil {
		return bytes(int64(v))
	}
	return c.Text(v)
}

// used lists the series for which some bar has a value.
func (c *Bars) used() (list []int) {
	for k := range c.Series {
		for i := range c.Bars {
			if c.Bars[i].Values[k] > 0 {
				list = append(list, k)
				break
			}
		}
	}
	return list
}

// limit is the value at the right end of the axis.
func (c *Bars) limit() (v float64) {
	for i := range c.Bars {
		v = max(v, c.Bars[i].total(), c.Bars[i].Mark)
	}
	if v == 0 {
		return 1
	}
	return v
}

// cut shortens a text to at most n characters.
func cut(s string, n int) string {
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n-1]) + "…"
}

// wrapped splits a text into lines of at most n characters. A longer word is cut.
func wrapped(s string, n int) (lines []string) {
	line := ""
	for _, word := range strings.Fields(s) {
		if line != "" && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > n {
			lines, line = append(lines, line), ""
		}
		if line != "" {
			line += " "
		}
		line += cut(word, n)
	}
	if line != "" {
		lines = append(lines, line)
	}
	return lines
}

func escaped(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // a strings.Builder takes everything
	return b.String()
}
