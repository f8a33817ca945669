package report

import (
	stdbytes "bytes"
	"encoding/xml"
	"fmt"
	"io"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/spillway-ml/spillway/graph"
)

// rectangle is a rect of an SVG, or a line with width 0. writing is a text and its position.
type rectangle struct {
	class, fill         string
	x, y, width, height float64
}

type writing struct {
	x, y float64
	text string
}

// drawn parses a chart's SVG and returns its rectangles and texts.
func drawn(t require.TestingT, c *Bars) (rects []rectangle, texts []writing) {
	var out stdbytes.Buffer
	require.NoError(t, c.SVG(&out))
	dec := xml.NewDecoder(&out)
	var at *writing
	for {
		token, err := dec.Token()
		if err == io.EOF {
			return rects, texts
		}
		require.NoError(t, err)
		switch e := token.(type) {
		case xml.StartElement:
			get := func(name string) string {
				for _, a := range e.Attr {
					if a.Name.Local == name {
						return a.Value
					}
				}
				return ""
			}
			number := func(name string) float64 {
				v, err := strconv.ParseFloat("0"+get(name), 64)
				require.NoError(t, err)
				return v
			}
			switch e.Name.Local {
			case "rect":
				rects = append(rects, rectangle{get("class"), get("fill"), number("x"), number("y"), number("width"), number("height")})
			case "line": // a mark
				rects = append(rects, rectangle{class: get("class"), x: number("x1"), y: number("y1")})
			case "text":
				texts = append(texts, writing{x: number("x"), y: number("y")})
				at = &texts[len(texts)-1]
			case "title":
				at = nil
			}
		case xml.CharData:
			if s := strings.TrimSpace(string(e)); s != "" && at != nil {
				at.text = s
				at = nil
			}
		}
	}
}

func TestBarsOfAnyValues(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := Bars{Title: "a <title>", Note: strings.Repeat("a few words ", rapid.IntRange(0, 20).Draw(t, "words")), Series: Classes()}
		capacity := rapid.Int64Range(0, 1<<50).Draw(t, "cap")
		for i := range rapid.IntRange(1, 12).Draw(t, "bars") {
			var bytes [graph.NumClasses]int64
			for class := range bytes {
				bytes[class] = rapid.Int64Range(0, 1<<uint(rapid.IntRange(0, 50).Draw(t, "bits"))).Draw(t, "bytes")
			}
			c.Bars = append(c.Bars, MemoryBar(fmt.Sprintf("<ZeRO-%d & \"more\">%s", i, strings.Repeat("=", rapid.IntRange(0, 60).Draw(t, "name"))), bytes, capacity))
		}
		c.Mark = "cap"
		rects, texts := drawn(t, &c)
		widths, colour := map[float64]float64{}, map[string]bool{} // by bar
		for _, r := range rects {
			require.GreaterOrEqual(t, r.x, 0.0)
			require.LessOrEqual(t, r.x+r.width, float64(barsW), "nothing is cut")
			switch r.class {
			case "bar":
				widths[r.y] += r.width
			case "legend":
				require.False(t, colour[r.fill], "a colour is one class")
				colour[r.fill] = true
			}
		}
		wide, names := 0.0, 0
		for _, r := range rects {
			require.True(t, r.class != "bar" || colour[r.fill], "every colour of a bar is in the legend")
		}
		for _, w := range widths {
			wide = max(wide, w)
		}
		high := 0.0
		for i := range c.Bars {
			high = max(high, c.Bars[i].total())
		}
		require.InDelta(t, float64(barsW-8)*high/c.limit(), wide, 0.2, "widths are in proportion")
		for i, w := range texts {
			if strings.HasPrefix(w.text, "<ZeRO-") {
				names++
			}
			for _, v := range texts[:i] { // names are aligned left, values right
				require.False(t, w.y == v.y && w.x == v.x, "%v covers %v", w, v)
				require.False(t, strings.HasPrefix(v.text, "<ZeRO-") && w.y == v.y && utf8.RuneCountInString(v.text+w.text) > barColumns, "%v reaches %v", v, w)
			}
		}
		require.Equal(t, len(c.Bars), names)
	})
}

func TestBarsShowEveryClassAndTheCap(t *testing.T) {
	var classes [graph.NumClasses]int64
	for class := range classes {
		classes[class] = 1 << 20
	}
	c := Bars{Title: "memory", Note: "a note of /a/" + strings.Repeat("long", 20), Series: Classes(), Mark: "cap", Bars: []Bar{MemoryBar("one", classes, 20<<20)}}
	var out stdbytes.Buffer
	require.NoError(t, c.SVG(&out))
	for class := range graph.NumClasses {
		require.Contains(t, out.String(), "one, "+class.String()+": 1.00 MiB")
	}
	require.Contains(t, out.String(), "9.00 MiB · cap 20.00 MiB")
	require.Contains(t, out.String(), ">a note of<")
	require.Contains(t, out.String(), "longlo…<")
	require.Zero(t, MemoryBar("one", classes, 1<<40).Mark, "it would make the bars narrow")
	require.ErrorContains(t, (&Bars{}).SVG(&out), "no bars")
}
