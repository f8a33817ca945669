package memplan_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/layouts"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/internal/testkit/progtext"
	"github.com/spillway-ml/spillway/memplan"
)

// TestTransformers compares the planned extent with the lower bound on programs with the shapes of
// presets, and logs the planning time.
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
		if c.layers > 12 && c.name != "405b" && !long.On() {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			p := memplan.Transformer(c.layers, c.width, 1024, 50304, c.ranks, c.prefetch, c.micros, c.recompute)
			start := time.Now()
			l, err := memplan.Assign(p, memplan.Options{})
			took := time.Since(start)
			require.NoError(t, err)
			ops := 0
			for _, ph := range p.Sections[0].Phases {
				ops += len(ph.Ops)
			}
			u := l.Spaces[graph.Device]
			t.Logf("%d operations, %d buffers: %v, peak %.4f of the bound, at %s", ops, len(p.Buffers), took, float64(u.Peak)/float64(u.LowerBound), u.PeakAt)
			require.NoError(t, layouts.Check(p, l))
			require.LessOrEqual(t, float64(u.Peak), 1.02*float64(u.LowerBound))
		})
	}
}

// TestBars plans and draws programs in text form. Check must accept each plan.
func TestBars(t *testing.T) {
	datadriven.RunTest(t, "testdata/bars", func(t *testing.T, d *datadriven.TestData) string {
		var align int64
		d.ScanArgs(t, "align", &align)
		p, err := progtext.Parse(progtext.Header + "\n" + d.Input + "\n")
		require.NoError(t, err)
		l, err := memplan.Assign(p, memplan.Options{Align: align})
		require.NoError(t, err)
		require.NoError(t, layouts.Check(p, l))
		var b strings.Builder
		require.NoError(t, layouts.Bars(p, l, &b))
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

// TestTouched: a training step uses its arena up to the last byte on every rank. A view by rank
// counts only the rank's own part.
func TestTouched(t *testing.T) {
	p := memplan.Transformer(2, 64, 32, 512, 3, 1, 2, false)
	l, err := memplan.Assign(p, memplan.Options{})
	require.NoError(t, err)
	for rank := range 3 {
		require.Equal(t, l.Spaces[graph.Device].Peak, memplan.Touched(p, l, []int{rank})[graph.Device])
	}
	p = parse(t, `
mesh data=3
buffer full f32 [192] device activations phase
buffer own f32 [64] device activations phase view=full stride=256
section step
phase main ×1
  own: fill -> own {}
`)
	l, err = memplan.Assign(p, memplan.Options{})
	require.NoError(t, err)
	require.EqualValues(t, 768, l.Spaces[graph.Device].Peak)
	for rank, want := range []int64{256, 512, 768} {
		require.Equal(t, want, memplan.Touched(p, l, []int{rank})[graph.Device])
	}
}

// TestSizeOnly: with twice the width and no effect of alignment, the plan is the same with every
// size doubled.
func TestSizeOnly(t *testing.T) {
	read := func(elems int) *memplan.Layout {
		l, err := memplan.Assign(parse(t, strings.ReplaceAll(`
buffer a f32 [N] device activations phase
buffer b f32 [N] device activations phase
buffer c f32 [N,3] device activations phase
buffer d f32 [N,2] device activations phase
section step
phase main ×1
  a: fill -> a {}
  b: copy a -> b
  c: fill -> c {}
  d: fill -> d {}
  a2: copy b -> a
`, "N", fmt.Sprint(elems))), memplan.Options{})
		require.NoError(t, err)
		return l
	}
	one, two := read(64), read(128)
	for i := range one.Offset {
		require.Equal(t, 2*one.Offset[i], two.Offset[i])
	}
	require.Equal(t, 2*one.Spaces[graph.Device].Peak, two.Spaces[graph.Device].Peak)
}

func TestAssignRefuses(t *testing.T) {
	good := "buffer a f32 [64] device activations phase\nsection step\nphase main ×1\n  a: fill -> a {}\n"
	for _, c := range []struct{ text, err string }{
		{strings.Replace(good, "-> a", "-> %7", 1), "memplan.Assign: step/main/a: output 0 is buffer 7, want one of the program's 1"},
		{strings.Replace(good, "phase\n", "phase view=%3\n", 1), "memplan.Assign: buffer a: views buffer 3, want another of the program's 1"},
		{strings.Replace(good, "[64]", "[9000000000,9000000000]", 1), "has more bytes than an int64 counts"},
		{strings.Replace(good, "{}", "{} @stream(77)", 1), "stream(77) is not one of the 7 streams"},
		{strings.Replace(good, "{}", "{} wait=1", 1), "waits for event 1, want one of 1 to 0"},
	} {
		p := parse(t, c.text)
		_, err := memplan.Assign(p, memplan.Options{})
		require.ErrorContains(t, err, c.err)
	}
	_, err := memplan.Assign(parse(t, good), memplan.Options{Align: 48})
	require.ErrorContains(t, err, "memplan.Assign: alignment 48 is not a power of two")
	_, err = memplan.Assign(parse(t, good), memplan.Options{Align: -64})
	require.Error(t, err)
	l, err := memplan.Assign(parse(t, ""), memplan.Options{})
	require.NoError(t, err)
	require.Empty(t, l.Offset)
	require.Zero(t, l.Spaces)

	p := parse(t, good)
	l, err = memplan.Assign(p, memplan.Options{})
	require.NoError(t, err)
	require.ErrorContains(t, layouts.Bars(parse(t, ""), l, &strings.Builder{}), "1 offsets, want one for each of the program's 0 buffers")
	p.Sections[0].Phases[0].Ops[0].Out[0].Buf = 9
	require.ErrorContains(t, layouts.Check(p, l), "step/main/a uses buffer 9")
	require.Error(t, layouts.Bars(p, l, &strings.Builder{}))
}
