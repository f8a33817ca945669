package graph_test

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/progtext"
)

// TestText parses programs in text form; "format" prints one again.
func TestText(t *testing.T) {
	datadriven.RunTest(t, "testdata/text", func(t *testing.T, d *datadriven.TestData) string {
		p, err := progtext.Parse(progtext.Header + "\n" + d.Input + "\n")
		switch d.Cmd {
		case "format":
			require.NoError(t, err)
			text := graph.Format(p)
			q, err := progtext.Parse(text)
			require.NoError(t, err)
			require.Equal(t, p, q)
			require.Equal(t, text, graph.Format(q))
			return text
		case "verify":
			require.NoError(t, err)
			require.NoError(t, graph.Verify(p))
			return "hash " + graph.Hash(p) + "\n"
		}
		d.Fatalf(t, "unknown command %s", d.Cmd)
		return ""
	})
}

// drawText returns a program with arbitrary values in its fields.
func drawText(t *rapid.T) *graph.Program {
	names := rapid.OneOf(rapid.StringMatching(`[a-z]\.[0-9]{1,3}\.w`), rapid.SampledFrom([]string{"", "_", "a", "a b", "7", "007", "x<1+2>", "é×3 {", "\"q\"", "a#1", "a=b", "\xff\n", "}", "->", "+y", "{", "@comm"}), rapid.String())
	nm := func() string { return names.Draw(t, "name") }
	num := func() int64 {
		return rapid.OneOf(rapid.Int64Range(-3, 12), rapid.SampledFrom([]int64{math.MaxInt64, math.MinInt64})).Draw(t, "num")
	}
	small := func(lo, hi int) int { return rapid.IntRange(lo, hi).Draw(t, "small") }
	flag := func() bool { return small(0, 1) == 1 }
	p := &graph.Program{}
	for range small(0, 2) {
		p.Mesh = append(p.Mesh, graph.Axis{nm(), small(-1, 9)})
	}
	p.Events = small(0, 5)
	nBuf := small(0, 5)
	buf := func() graph.BufID { return graph.BufID(small(-2, nBuf+1)) }
	for _, id := range []*graph.BufID{&p.Tokens, &p.Targets, &p.Positions, &p.Hyper, &p.Key, &p.Loss, &p.GradNorm, &p.Logits} {
		if *id = graph.NoBuf; flag() {
			*id = buf()
		}
	}
	for range small(0, 2) {
		p.Scalars = append(p.Scalars, graph.Scalars{buf(), buf(), buf()})
	}
	ints := func() (list []int64) {
		for range small(0, 3) {
			list = append(list, num())
		}
		return list
	}
	for range nBuf {
		b := graph.Buffer{Name: nm(), DType: graph.DType(small(0, 9)), Shape: ints(), Space: graph.Space(small(0, 4)), Class: graph.Class(small(0, 10)), Life: graph.Life(small(0, 4)), Unit: small(-2, 3), Pad: num(), Global: ints(), Port: graph.Port(small(0, 12)), Micro: small(-1, 3)}
		if flag() {
			b.View = &graph.View{buf(), num(), num(), small(-1, 2)}
		}
		for range small(0, 2) {
			b.Place = append(b.Place, graph.Placement(small(0, 4)))
		}
		p.Buffers = append(p.Buffers, b)
	}
	state := func() graph.State { return graph.State{nm(), buf(), small(-1, 2), num(), flag()} }
	for range small(0, 2) {
		u := graph.Unit{Name: nm(), FlatLen: num(), Frozen: flag(), Block: graph.Block{nm(), small(-1, 3)}}
		for range small(0, 3) {
			u.Segments = append(u.Segments, graph.Segment{small(-1, 3), num(), num(), num()})
		}
		if flag() {
			u.Value = state()
		}
		for range small(0, 2) {
			u.States = append(u.States, state())
		}
		if flag() {
			u.Compute = state()
		}
		if flag() {
			u.Grad = &graph.Gradient{Leaf: graph.DType(small(0, 9)), Wire: graph.DType(small(0, 9)), Order: graph.SumOrder(small(0, 2)), Int8: flag(), Each: flag(), Axis: small(-1, 2), Parted: flag(), Replicas: small(-1, 2),
				Whole: buf(), Part: buf(), Home: buf(), Sent: buf(), Update: buf()}
		}
		p.Units = append(p.Units, u)
	}
	float := func() float64 {
		return rapid.OneOf(rapid.Float64(), rapid.SampledFrom([]float64{0, math.Copysign(0, -1), math.Inf(1), 1e-8})).Draw(t, "float")
	}
	for range small(0, 3) {
		var split *graph.Split
		if flag() {
			split = &graph.Split{Dim: small(-1, 3), Axis: small(-1, 2)}
			if flag() {
				split.Slices, split.Slice, split.Groups, split.Of = small(1, 9), small(0, 3), small(0, 3), small(0, 9)
			}
		}
		p.Params = append(p.Params, graph.Param{Split: split, Name: nm(), Shape: ints(), Init: graph.InitKind(small(0, 5)), Std: float(), Unit: small(-1, 2), Decay: flag(), Frozen: flag(), Value: buf(), Grad: buf()})
	}
	attrs := []any{nil, graph.PosAttr{Seq: num(), Rows: graph.SliceAttr{small(-1, 2), num(), num(), num(), num()}}, graph.LinearAttr{flag(), graph.ActKind(nm()), flag()}, graph.FillAttr{float()}, graph.SliceAttr{small(-1, 2), num(), num(), num(), num()}, graph.GroupAttr{Axis: small(-1, 2), Order: graph.SumOrder(small(0, 3))},
		graph.UpdateAttr{Shard: graph.ShardAttr{small(0, 2), small(-1, 2), num(), num(), num(), small(0, 3)}, Beta1: float(), Nesterov: flag()}}
	for range small(0, 2) {
		s := graph.Section{Name: nm(), Kind: graph.SectionKind(small(0, 12)), Form: graph.Form(small(0, 3))}
		for range small(0, 2) {
			s.Shares = append(s.Shares, small(-1, 5))
		}
		for range small(0, 2) {
			ph := graph.Phase{Name: nm(), Kind: graph.PhaseKind(small(0, 4)), First: flag(), Last: flag(), Repeat: small(-1, 3), Round: small(0, 2)}
			for range small(0, 8) {
				op := graph.Op{Kind: rapid.SampledFrom([]graph.Kind{graph.Linear, graph.Fill, graph.ParamNorms, graph.Join, "no such", ""}).Draw(t, "kind"), Name: nm(),
					Work: buf(), Attr: rapid.SampledFrom(attrs).Draw(t, "attr"), Stream: graph.StreamID(small(0, 6)), Record: graph.EventID(small(-1, 5)),
					Pass: graph.Pass(small(0, 5)), Unit: small(-2, 3), Micro: small(-1, 2), Source: nm(), Skip: buf()}
				for range small(0, 3) {
					op.In = append(op.In, buf())
					op.Out = append(op.Out, graph.Out{buf(), graph.Mode(small(0, 4))})
					op.Wait = append(op.Wait, graph.EventID(small(-1, 5)))
				}
				ph.Ops = append(ph.Ops, op)
				for range small(0, 3) { // what folds
					again := op
					again.Name = fmt.Sprintf("l.%d.x", len(ph.Ops))
					ph.Ops = append(ph.Ops, again)
				}
			}
			s.Phases = append(s.Phases, ph)
		}
		p.Sections = append(p.Sections, s)
	}
	return p
}

func TestTextRoundTrip(t *testing.T) {
	folded := 0
	rapid.Check(t, func(t *rapid.T) {
		p := drawText(t)
		text := graph.Format(p)
		if strings.Contains(text, "\n×") {
			folded++
		}
		q, err := progtext.Parse(text)
		require.NoError(t, err, text)
		require.Equal(t, p, q)
		require.Equal(t, text, graph.Format(q))
	})
	require.NotZero(t, folded)
}

func TestHash(t *testing.T) {
	p, err := progtext.Parse(sound)
	require.NoError(t, err)
	h := graph.Hash(p)
	require.Equal(t, h, graph.Hash(p.Clone()))
	q := p.Clone()
	q.Sections[0].Phases[1].Ops[1].Attr = graph.FillAttr{Value: 2}
	require.NotEqual(t, h, graph.Hash(q))
}

// TestGatherTwice: a rank's part is copied in, gathered and used, twice in a row. Each gather
// begins a new live range.
func TestGatherTwice(t *testing.T) {
	p, err := progtext.Parse(progtext.Header + `
mesh data=4
buffer own f32 [8] device inputs run
buffer full f32 [32] device unsharded step
buffer part f32 [8] device unsharded step view=full stride=32
buffer y f32 [32] device activations step
section step
phase fwd ×1
  in: copy own -> part
  gather: all_gather part -> full {}
  use: copy full -> y
phase bwd ×1
  in: copy own -> part
  gather: all_gather part -> full {}
  use: add y full -> ~y
`)
	require.NoError(t, err)
	require.NoError(t, graph.Verify(p))
	regions, err := graph.NewRegions(p)
	require.NoError(t, err)
	tr, err := graph.NewTrace(p, regions, &p.Sections[0])
	require.NoError(t, err)
	require.Equal(t, []graph.LiveRange{
		{Buf: 1, Steps: []int32{0, 1, 2}},
		{Buf: 1, Steps: []int32{3, 4, 5}},
		{Buf: 3, Steps: []int32{2, 5}},
	}, tr.LiveRanges())
}
