package report

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"regexp"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/graph"
)

// Page is a plan as a person reads it. Texts are written out already: the
// package draws.
type Page struct {
	Title    string
	Subtitle string
	Verdict  string // whether it fits, and by how much; "": no plan is judged
	Fits     bool
	Charts   []*Bars
	Tables   []Table
	Spaces   []SpaceChart // side by side where there is room
	Peak     []Table      // the peak explained
	Advice   *Advice      // what to run; nil: nothing that fits is known
	Ways     []Table      // what would make it fit; none where it does, or nothing would
	NoWay    string       // where nothing makes it fit: what was tried
	Lines    []string     // remarks
	Made     string       // the command that makes this page, to be run again; "": not told
	By       string       // the program and its version, and when
}

// Advice is a configuration to run: its command, its flags or words in their place, what it takes
// beside the request, and what is to be said about it.
type Advice struct {
	Title, Command, Flags, Words string
	Beside                       *Table // nil: nothing is compared
	Lines                        []string
}

// Table has a heading and rows of text. Numbers are set to the right, except in a column without a
// heading, which holds names.
type Table struct {
	Title string
	Note  string
	Head  []string
	Rows  [][]string
	// Above holds, a row each, what stands above it over the whole width, as flags
	// of any length do; nil: nothing.
	Above []string
	Mark  int // row that was asked for; −1 none
	// MarkColumn is the column that was asked for; 0, which holds names: none.
	MarkColumn int
}

// SpaceChart is a timeline with its cap.
type SpaceChart struct {
	*Timeline
	Of       string // which configuration it is of
	Capacity int64  // bytes that the arena may take; 0: no cap
}

//go:embed page.html
var pageHTML string

var page = template.Must(template.New("page").Funcs(template.FuncMap{
	"chart":  chart,
	"bars":   (*Bars).inline,
	"data":   chartData,
	"number": isNumber,
	"prose":  prose,
	// right says that a column holds numbers, which its heading follows.
	"right": func(t Table, column int) bool {
		return slices.ContainsFunc(t.Rows, func(row []string) bool { return column < len(row) && isNumber(row[column]) })
	},
	"colour": func(c graph.Class) template.CSS { return template.CSS(colours[c]) },
	"classes": func() []graph.Class {
		var list []graph.Class
		for c := range graph.NumClasses {
			list = append(list, c)
		}
		return list
	},
	"share": func(c SpaceChart, class graph.Class) bool {
		for i := range c.Columns {
			if c.Columns[i].Bytes[class] > 0 {
				return true
			}
		}
		return false
	},
	"bytes": bytes,
	"peak":  func(c SpaceChart) Column { return c.Columns[c.Timeline.Peak] },
}).Parse(pageHTML))

// HTML writes the page: one file, without anything to load.
func (p *Page) HTML(w io.Writer) error {
	if err := page.Execute(w, p); err != nil {
		return fmt.Errorf("report: page: %w", err)
	}
	return nil
}

// colours by class: the Okabe–Ito palette, which people tell apart with any
// colour vision, and grey for what holds nothing.
var colours = [graph.NumClasses]string{
	graph.Parameters: "#0072b2", graph.Gradients: "#d55e00", graph.Optimizer: "#cc79a7", graph.Activations: "#009e73",
	graph.Unsharded: "#56b4e9", graph.Communication: "#8c6d31", graph.Workspace: "#f0e442", graph.Inputs: "#e69f00", graph.Padding: "#9a9a9a",
}

// The chart's coordinates.
const (
	chartW, chartH           = 520, 250
	left, right, top, bottom = 70, 6, 14, 22
	plotW, plotH             = chartW - left - right, chartH - top - bottom
)

// scale is the bytes at the top of a chart: the arena, and the cap where that is
// near enough to be of use.
func scale(c SpaceChart) int64 {
	limit := c.Extent
	if c.Capacity > 0 && c.Capacity < 3*c.Extent {
		limit = max(limit, c.Capacity)
	}
	return limit + limit/20
}

// chart draws the areas: readable without a script, and on paper.
func chart(c SpaceChart) template.HTML {
	var b strings.Builder
	n := len(c.Columns)
	limit := scale(c)
	x := func(i int) float64 { return left + float64(i)*plotW/float64(n) }
	y := func(v int64) float64 { return top + plotH*(1-float64(v)/float64(limit)) }
	fmt.Fprintf(&b, `<svg viewBox="0 0 %d %d" role="img" aria-label="%s memory over section %s">`, chartW, chartH, c.Space, template.HTMLEscapeString(c.Section))
	// Bands of passes, behind.
	for i := 0; i < n; {
		j := i
		for j < n && c.Columns[j].Pass == c.Columns[i].Pass {
			j++
		}
		fmt.Fprintf(&b, `<rect class="pass p%d" x="%.1f" y="%d" width="%.1f" height="%d"/>`, c.Columns[i].Pass, x(i), top, x(j)-x(i), plotH)
		if x(j)-x(i) > 55 {
			fmt.Fprintf(&b, `<text class="axis" x="%.1f" y="%d" text-anchor="middle">%s</text>`, (x(i)+x(j))/2, chartH-bottom+14, c.Columns[i].Pass)
		}
		i = j
	}
	for k := range 5 {
		v := c.Extent * int64(k) / 4
		fmt.Fprintf(&b, `<line class="grid" x1="%d" x2="%d" y1="%.1f" y2="%.1f"/><text class="axis" x="%d" y="%.1f" text-anchor="end">%s</text>`,
			left, chartW-right, y(v), y(v), left-6, y(v)+4, bytes(v))
	}
	b.WriteString(areas(c, x, y))
	line := func(class string, v int64, text string) {
		fmt.Fprintf(&b, `<line class="%s" x1="%d" x2="%d" y1="%.1f" y2="%.1f"/><text class="%s" x="%d" y="%.1f" text-anchor="end">%s</text>`,
			class, left, chartW-right, y(v), y(v), class, chartW-right-4, y(v)-4, text)
	}
	line("arena", c.Extent, "arena "+bytes(c.Extent))
	if c.Capacity > 0 && c.Capacity <= limit {
		line("cap", c.Capacity, "cap "+bytes(c.Capacity))
	}
	peak := c.Timeline.Peak
	fmt.Fprintf(&b, `<line class="peak" x1="%.1f" x2="%.1f" y1="%d" y2="%d"/>`, x(peak)+plotW/float64(2*n), x(peak)+plotW/float64(2*n), top, chartH-bottom)
	fmt.Fprintf(&b, `<rect class="hover" x="0" y="%d" width="1" height="%d" visibility="hidden"/></svg>`, top, plotH)
	return template.HTML(b.String())
}

// areas draws the classes on top of each other: each area goes down to the ground, and those
// below are painted over it.
func areas(c SpaceChart, x func(int) float64, y func(int64) float64) string {
	var paths []string
	sums := make([]int64, len(c.Columns))
	for class := range graph.NumClasses {
		used, last := false, int64(-1)
		var path strings.Builder
		fmt.Fprintf(&path, `<path fill="%s" d="M%.1f %.1f`, colours[class], x(0), y(0))
		for i := range c.Columns {
			v := c.Columns[i].Bytes[class]
			used = used || v > 0
			if sums[i] += v; sums[i] != last {
				fmt.Fprintf(&path, "H%.1fV%.1f", x(i), y(sums[i]))
				last = sums[i]
			}
		}
		if used {
			fmt.Fprintf(&path, `H%.1fV%.1fZ"/>`, x(len(c.Columns)), y(0))
			paths = append(paths, path.String())
		}
	}
	slices.Reverse(paths)
	return strings.Join(paths, "")
}

// chartData is what the script needs to name what is under the pointer.
func chartData(c SpaceChart) (template.JS, error) {
	type column struct {
		Label string `json:"l"`
		Total int64  `json:"t"`
	}
	doc := struct {
		Scale   int64    `json:"scale"`
		Columns []column `json:"columns"`
		Classes []string `json:"classes"`
		Buffers []any    `json:"buffers"` // name, class, bytes, shape, lives: columns from and to, and bytes where they differ
	}{Scale: scale(c)}
	for _, col := range c.Columns {
		doc.Columns = append(doc.Columns, column{col.Label, col.Total})
	}
	for class := range graph.NumClasses {
		doc.Classes = append(doc.Classes, class.String())
	}
	doc.Buffers = append(doc.Buffers, large(c)...)
	text, err := json.Marshal(doc)
	return template.JS(text), err
}

// large lists the buffers that can be pointed at, by class; behind those of a class is the sum of
// what would be too thin.
func large(c SpaceChart) (list []any) {
	least := c.Extent * 3 / int64(2*max(len(c.Columns), 3))
	for class := range graph.NumClasses {
		small, count := make([]int64, len(c.Columns)), 0
		for _, b := range c.Buffers {
			if b.Class != class {
				continue
			}
			if b.Bytes >= least {
				list = append(list, []any{b.Name, int(class), b.Bytes, b.Shape, b.Lives})
				continue
			}
			count++
			for _, v := range b.Lives {
				for i := v[0]; i <= v[1]; i++ {
					small[i] += b.Bytes
				}
			}
		}
		var runs [][3]int64
		for i, v := range small {
			if n := len(runs); n > 0 && runs[n-1][2] == v {
				runs[n-1][1] = int64(i)
			} else if v > 0 || n > 0 {
				runs = append(runs, [3]int64{int64(i), int64(i), v})
			}
		}
		if len(runs) > 0 {
			list = append(list, []any{fmt.Sprintf("some of %d small buffers", count), int(class), 0, "", runs})
		}
	}
	return list
}

// flagIn is a flag in running text, which is not to be broken.
var flagIn = regexp.MustCompile(`--[a-z0-9-]+`)

// prose is running text with its flags in one piece.
func prose(s string) template.HTML {
	return template.HTML(flagIn.ReplaceAllString(template.HTMLEscapeString(s), `<span class="flag">$0</span>`))
}

func isNumber(s string) bool {
	if s == "–" { // none
		return true
	}
	s = strings.TrimLeft(s, "−-→ ")
	return s != "" && s[0] >= '0' && s[0] <= '9'
}

// bytes prints a size in binary units.
func bytes(n int64) string {
	v, units := float64(n), []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB"}
	u := 0
	for v >= 1024 && u < len(units)-1 {
		v, u = v/1024, u+1
	}
	if u == 0 {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.2f %s", v, units[u])
}
