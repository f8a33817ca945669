package report

import (
	stdbytes "bytes"
	"encoding/xml"
	"fmt"
	"io"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/spillway-ml/spillway/graph"
)

// rectangle is what an SVG's rect says; text what is written, and where.
type rectangle struct {
	class, fill         string
	x, y, width, height float64
}

type writing struct {
	x, y float64
	text string
}

// drawn reads a chart as XML.
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

func TestBarsOfAnyMemory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var c Bars
		for i := range rapid.IntRange(1, 12).Draw(t, "bars") {
			bar := Bar{Name: fmt.Sprintf("<ZeRO-%d & \"more\">", i)}
			for class := range bar.Bytes {
				bar.Bytes[class] = rapid.Int64Range(0, 1<<uint(rapid.IntRange(0, 50).Draw(t, "bits"))).Draw(t, "bytes")
			}
			c.Bars = append(c.Bars, bar)
		}
		c.Title = "a <title>"
		c.Capacity = rapid.Int64Range(0, 1<<50).Draw(t, "cap")
		rects, texts := drawn(t, &c)
		heights := map[float64]float64{} // by bar
		colour := map[string]bool{}
		for _, r := range rects {
			switch r.class {
			case "bar":
				require.GreaterOrEqual(t, r.x, float64(barsLeft))
				require.LessOrEqual(t, r.x+r.width, float64(barsLeft+barsPlotW), "no bar is cut")
				require.GreaterOrEqual(t, r.y, float64(barsTop), "no bar is cut")
				heights[r.x] += r.height
			case "legend":
				require.False(t, colour[r.fill], "a colour is one class")
				colour[r.fill] = true
				require.GreaterOrEqual(t, r.x, float64(barsLeft+barsPlotW), "the legend covers no bar")
				require.GreaterOrEqual(t, r.y, float64(barsTop))
			}
		}
		for _, r := range rects {
			require.True(t, r.class != "bar" || colour[r.fill], "every colour of a bar is in the legend")
		}
		high := 0.0
		for _, h := range heights {
			high = max(high, h)
		}
		if c.highest() > 0 {
			want := float64(barsPlotH) * float64(c.highest()) / float64(c.limit())
			require.InDelta(t, want, high, 0.1, "heights are in proportion")
		}
		names, grid := 0, 0
		for _, w := range texts {
			if strings.HasPrefix(w.text, "<ZeRO-") {
				names++
			}
			if w.x == barsLeft-8 {
				grid++
			}
			require.True(t, w.y > 0 && w.y < barsH, "%+v", w)
		}
		require.Equal(t, len(c.Bars), names)
		require.True(t, grid >= 2 && grid <= 11, "%d lines", grid)
	})
}

func TestBarsShowEveryClassAndTheCap(t *testing.T) {
	c := Bars{Title: "memory", Note: "a note", Bars: []Bar{{Name: "one"}}, Capacity: 20 << 20}
	for class := range c.Bars[0].Bytes {
		c.Bars[0].Bytes[class] = 1 << 20
	}
	var out stdbytes.Buffer
	require.NoError(t, c.SVG(&out))
	for class := range graph.NumClasses {
		require.Contains(t, out.String(), "one, "+class.String()+": 1.00 MiB")
	}
	require.Contains(t, out.String(), "cap 20.00 MiB")
	require.Contains(t, out.String(), "a note")
	c.Capacity = 1 << 40
	out.Reset()
	require.NoError(t, c.SVG(&out))
	require.NotContains(t, out.String(), "cap ", "it would flatten the bars")
	require.ErrorContains(t, (&Bars{}).SVG(&out), "no bars")
}
