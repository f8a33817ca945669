package report

import (
	stdbytes "bytes"
	"encoding/json"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/layouts"
	"github.com/spillway-ml/spillway/memplan"
)

// chain builds a program of n activations, each made from the one before. Its phase runs twice, and
// a buffer of 1,000 bytes lives for the run.
func chain(t *testing.T, n int) (*graph.Program, *memplan.Layout) {
	t.Helper()
	p := &graph.Program{}
	for _, id := range []*graph.BufID{&p.Tokens, &p.Targets, &p.Positions, &p.Hyper, &p.Key, &p.Loss, &p.GradNorm, &p.Logits} {
		*id = graph.NoBuf
	}
	at := p.AddBuffer(graph.Buffer{Name: "w", DType: graph.F32, Shape: []int64{250}, Class: graph.Parameters, Life: graph.LifeRun, Unit: -1})
	var ops []graph.Op
	for i := range n {
		next := p.AddBuffer(graph.Buffer{Name: "x<" + string(rune('a'+i%26)), DType: graph.F32, Shape: []int64{250}, Class: graph.Activations, Unit: -1})
		ops = append(ops, graph.Op{Kind: graph.Activation, Name: "act" + string(rune('a'+i%26)), In: []graph.BufID{at}, Out: []graph.Out{{Buf: next}},
			Attr: graph.ActAttr{Act: graph.ActReLU}, Work: graph.NoBuf, Skip: graph.NoBuf, Unit: -1})
		at = next
	}
	p.Sections = []graph.Section{{Name: "step", Phases: []graph.Phase{{Name: "micro", Repeat: 3, Ops: ops}}}}
	l, err := layouts.Assign(p, memplan.Options{Align: 4})
	require.NoError(t, err)
	return p, l
}

func TestTimelineAddsUp(t *testing.T) {
	for _, n := range []int{1, 2, 7, 5000} {
		p, l := chain(t, n)
		tl, err := NewTimeline(p, l, "step", graph.Device, Columns)
		require.NoError(t, err)
		require.Len(t, tl.Columns, min(2*n, Columns))
		require.Equal(t, l.Spaces[graph.Device].Peak, tl.Extent)
		require.Equal(t, l.Spaces[graph.Device].LowerBound, tl.Columns[tl.Peak].Total)
		for i, c := range tl.Columns {
			var classes, buffers int64
			for _, b := range c.Bytes {
				classes += b
			}
			for _, b := range tl.Buffers {
				for _, v := range b.Lives {
					if v[0] <= i && i <= v[1] {
						buffers += b.Bytes
					}
				}
			}
			require.Equal(t, c.Total, classes, "column %d", i)
			require.Equal(t, c.Total, buffers, "column %d", i)
		}
	}
	p, l := chain(t, 3)
	_, err := NewTimeline(p, l, "eval", graph.Device, Columns)
	require.ErrorContains(t, err, `"eval"`)
	host, err := NewTimeline(p, l, "step", graph.Host, Columns)
	require.NoError(t, err)
	require.Empty(t, host.Columns)
}

// The page loads no other file, contains the data that its script reads, and escapes names.
func TestPageStandsAlone(t *testing.T) {
	p, l := chain(t, 9)
	tl, err := NewTimeline(p, l, "step", graph.Device, Columns)
	require.NoError(t, err)
	page := Page{Title: "Plan of <model>", Verdict: "Fits", Fits: true, Spaces: []SpaceChart{{Timeline: tl, Capacity: 5000}},
		Tables: []Table{{Title: "stages", Head: []string{"ZeRO", "peak"}, Rows: [][]string{{"0", "3.00 MiB"}, {"1", "2.00 MiB"}}, Mark: 1}},
		Peak: []Table{{Title: "by stage", Head: []string{"ZeRO", "0", "1"}, Rows: [][]string{{"peak", "3.00 MiB", "2.00 MiB"}, {"at", "head", "tail"}}, Mark: -1, MarkColumn: 2},
			{Title: "by name", Head: []string{"", "step"}, Rows: [][]string{{"8 × h100-80", "0.35"}}, Mark: -1}},
		Advice: &Advice{Flags: "--zero <3>", Lines: []string{"1.00 s a step"}}, NoWay: "Nothing <helps>",
		Ways: []Table{{Title: "ways", Head: []string{"step", "costs"}, Above: []string{"--zero 3"}, Rows: [][]string{{"1.00 s", "a disk"}}, Mark: -1}}}
	var out stdbytes.Buffer
	require.NoError(t, page.HTML(&out))
	text := out.String()
	require.NotRegexp(t, regexp.MustCompile(`(?i)https?:|src=|@import|url\(|<link`), text)
	require.Contains(t, text, "Plan of &lt;model&gt;")
	require.NotContains(t, text, "x<a")
	require.Equal(t, 1, strings.Count(text, "<svg "))
	require.Contains(t, text, "cap 4.88 KiB")
	require.Contains(t, text, `<tr class="mark"><td data-head="ZeRO" class="n">1</td>`)
	require.Contains(t, text, `<td data-head="ZeRO">peak</td><td data-head="0" class="n">3.00 MiB</td><td data-head="1" class="n asked">2.00 MiB</td>`)
	require.Contains(t, text, `<td data-head="ZeRO">at</td><td data-head="0" class="t">head</td><td data-head="1" class="t asked">tail</td>`)
	require.Contains(t, text, `<td data-head="">8 × h100-80</td><td data-head="step" class="n">0.35</td>`)
	require.Contains(t, text, `<th>ZeRO</th><th class="n">0</th>`)
	require.Contains(t, text, `<code>--zero &lt;3&gt;</code>`)
	require.Contains(t, text, `<li>1.00 s a step</li>`)
	require.Contains(t, text, `Nothing &lt;helps&gt;`)
	require.Contains(t, text, `<td colspan="2"><code>--zero 3</code></td></tr>`)
	_, after, ok := strings.Cut(text, `<script type="application/json">`)
	require.True(t, ok)
	data, _, _ := strings.Cut(after, "</script>")
	var doc struct {
		Scale   int64
		Columns []struct {
			L string
			T int64
		}
		Buffers [][]any
	}
	require.NoError(t, json.Unmarshal([]byte(data), &doc))
	require.Len(t, doc.Columns, 18)
	require.Equal(t, tl.Columns[3].Total, doc.Columns[3].T)
	require.Len(t, doc.Buffers, 10)
}
