package memplan

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

// TestTransformers holds the extent against the lower bound on programs of the
// shapes that presets have, and reports how long planning takes.
func TestTransformers(t *testing.T) {
	for _, c := range []struct {
		name      string
		layers    int
		width     int64
		ranks     int
		prefetch  int
		micros    int
		recompute bool
	}{
		{"gpt2", 12, 768, 4, 1, 1, false},
		{"gpt2 accumulating", 12, 768, 4, 2, 4, false},
		{"gpt2 recompute", 12, 768, 3, 1, 2, true},
		{"405b", 126, 16384, 64, 1, 1, false},
		{"405b recompute", 126, 16384, 64, 2, 4, true},
		{"405b narrow", 126, 1024, 8, 0, 4, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := transformer(c.layers, c.width, 1024, 50304, c.ranks, c.prefetch, c.micros, c.recompute)
			start := time.Now()
			l, err := Assign(p, Options{})
			took := time.Since(start)
			require.NoError(t, err)
			ops := 0
			for _, ph := range p.Sections[0].Phases {
				ops += len(ph.Ops)
			}
			u := l.Spaces[graph.Device]
			t.Logf("%d operations, %d buffers: %v, peak %.4f of the bound, at %s", ops, len(p.Buffers), took, float64(u.Peak)/float64(u.LowerBound), u.PeakAt)
			require.NoError(t, Check(p, l))
			require.LessOrEqual(t, float64(u.Peak), 1.02*float64(u.LowerBound))
		})
	}
}

// TestBars plans programs in text form and draws them; Check agrees with each.
func TestBars(t *testing.T) {
	datadriven.RunTest(t, "testdata/bars", func(t *testing.T, d *datadriven.TestData) string {
		var align int64
		d.ScanArgs(t, "align", &align)
		p, err := graph.Parse("spillway program v1\n" + d.Input + "\n")
		require.NoError(t, err)
		l, err := Assign(p, Options{Align: align})
		require.NoError(t, err)
		require.NoError(t, Check(p, l))
		var b strings.Builder
		require.NoError(t, Bars(p, l, &b))
		for sp, u := range l.Spaces {
			if u.Peak == 0 {
				continue
			}
			fmt.Fprintf(&b, "%v alive at the peak:", graph.Space(sp))
			for _, id := range u.Live {
				fmt.Fprintf(&b, " %s", p.Buf(id).Name)
			}
			fmt.Fprintln(&b)
			for c := range u.ByClass {
				if u.ClassPeak[c] > 0 {
					fmt.Fprintf(&b, "  %-13v %8d, at most %8d\n", graph.Class(c), u.ByClass[c], u.ClassPeak[c])
				}
			}
		}
		return b.String()
	})
}
