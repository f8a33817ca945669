package graph

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// TestText reads programs as text. "format" prints one back, "shift" after
// putting a buffer in front (all names must follow), "error" what parsing says.
func TestText(t *testing.T) {
	datadriven.RunTest(t, "testdata/text", func(t *testing.T, d *datadriven.TestData) string {
		p, err := Parse(textHeader + "\n" + d.Input + "\n")
		switch d.Cmd {
		case "error":
			require.Error(t, err)
			return err.Error() + "\n"
		case "format":
			require.NoError(t, err)
			text := Format(p)
			q, err := Parse(text)
			require.NoError(t, err)
			require.Equal(t, p, q)
			require.Equal(t, text, Format(q))
			return text
		case "verify":
			require.NoError(t, err)
			require.NoError(t, Verify(p))
			return "hash " + Hash(p) + "\n"
		}
		d.Fatalf(t, "unknown command %s", d.Cmd)
		return ""
	})
}

// drawText returns a program with anything in its fields.
func drawText(t *rapid.T) *Program {
	names := rapid.OneOf(rapid.StringMatching(`[a-z]\.[0-9]{1,3}\.w`), rapid.SampledFrom([]string{"", "_", "a", "a b", "7", "007", "x<1+2>", "é×3 {", "\"q\"", "a#1", "a=b", "\xff\n", "}", "->", "+y", "{", "@comm"}), rapid.String())
	nm := func() string { return names.Draw(t, "name") }
	num := func() int64 {
		return rapid.OneOf(rapid.Int64Range(-3, 12), rapid.SampledFrom([]int64{math.MaxInt64, math.MinInt64})).Draw(t, "num")
	}
	small := func(lo, hi int) int { return rapid.IntRange(lo, hi).Draw(t, "small") }
	flag := func() bool { return small(0, 1) == 1 }
	p := emptyProgram()
	for range small(0, 2) {
		p.Mesh = append(p.Mesh, Axis{nm(), small(-1, 9)})
	}
	p.Events = small(0, 5)
	nBuf := small(0, 5)
	buf := func() BufID { return BufID(small(-2, nBuf+1)) }
	for _, w := range p.wellKnown() {
		if flag() {
			*w.id = buf()
		}
	}
	for range small(0, 2) {
		p.Scalars = append(p.Scalars, Scalars{buf(), buf(), buf()})
	}
	ints := func() (list []int64) {
		for range small(0, 3) {
			list = append(list, num())
		}
		return list
	}
	for range nBuf {
		b := Buffer{Name: nm(), DType: DType(small(0, 9)), Shape: ints(), Space: Space(small(0, 4)), Class: Class(small(0, 10)), Life: Life(small(0, 4)), Unit: small(-2, 3), Pad: num(), Global: ints(), Port: Port(small(0, 12)), Micro: small(-1, 3)}
		if flag() {
			b.View = &View{buf(), num(), num(), small(-1, 2)}
		}
		for range small(0, 2) {
			b.Place = append(b.Place, Placement(small(0, 4)))
		}
		p.Buffers = append(p.Buffers, b)
	}
	state := func() State { return State{nm(), buf(), small(-1, 2), num(), flag()} }
	for range small(0, 2) {
		u := Unit{Name: nm(), FlatLen: num(), Frozen: flag(), Block: Block{nm(), small(-1, 3)}}
		for range small(0, 3) {
			u.Segments = append(u.Segments, Segment{small(-1, 3), num(), num(), num()})
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
			u.Grad = &Gradient{Leaf: DType(small(0, 9)), Wire: DType(small(0, 9)), Order: SumOrder(small(0, 2)), Int8: flag(), Each: flag(), Axis: small(-1, 2), Parted: flag(), Replicas: small(-1, 2),
				Whole: buf(), Part: buf(), Home: buf(), Sent: buf(), Update: buf()}
		}
		p.Units = append(p.Units, u)
	}
	float := func() float64 {
		return rapid.OneOf(rapid.Float64(), rapid.SampledFrom([]float64{0, math.Copysign(0, -1), math.Inf(1), 1e-8})).Draw(t, "float")
	}
	for range small(0, 3) {
		var split *Split
		if flag() {
			split = &Split{Dim: small(-1, 3), Axis: small(-1, 2)}
			if flag() {
				split.Slices, split.Slice, split.Groups, split.Of = small(1, 9), small(0, 3), small(0, 3), small(0, 9)
			}
		}
		p.Params = append(p.Params, Param{Split: split, Name: nm(), Shape: ints(), Init: InitKind(small(0, 5)), Std: float(), Unit: small(-1, 2), Decay: flag(), Frozen: flag(), Value: buf(), Grad: buf()})
	}
	attrs := []any{nil, PosAttr{Seq: num(), Rows: SliceAttr{small(-1, 2), num(), num(), num(), num()}}, LinearAttr{flag(), ActKind(nm()), flag()}, FillAttr{float()}, SliceAttr{small(-1, 2), num(), num(), num(), num()}, GroupAttr{Axis: small(-1, 2), Order: SumOrder(small(0, 3))},
		UpdateAttr{Shard: ShardAttr{small(0, 2), small(-1, 2), num(), num(), num(), small(0, 3)}, Beta1: float(), Nesterov: flag()}}
	for range small(0, 2) {
		s := Section{Name: nm(), Kind: SectionKind(small(0, 12)), Form: Form(small(0, 3))}
		for range small(0, 2) {
			s.Shares = append(s.Shares, small(-1, 5))
		}
		for range small(0, 2) {
			ph := Phase{Name: nm(), Kind: PhaseKind(small(0, 4)), First: flag(), Last: flag(), Repeat: small(-1, 3), Round: small(0, 2)}
			for range small(0, 8) {
				op := Op{Kind: rapid.SampledFrom([]Kind{Linear, Fill, ParamNorms, Join, "no such", ""}).Draw(t, "kind"), Name: nm(),
					Work: buf(), Attr: rapid.SampledFrom(attrs).Draw(t, "attr"), Stream: StreamID(small(0, 6)), Record: EventID(small(-1, 5)),
					Pass: Pass(small(0, 5)), Unit: small(-2, 3), Micro: small(-1, 2), Source: nm(), Skip: buf()}
				for range small(0, 3) {
					op.In = append(op.In, buf())
					op.Out = append(op.Out, Out{buf(), Mode(small(0, 4))})
					op.Wait = append(op.Wait, EventID(small(-1, 5)))
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
	rapid.Check(t, func(t *rapid.T) {
		p := drawText(t)
		text := Format(p)
		q, err := Parse(text)
		require.NoError(t, err, text)
		require.Equal(t, p, q)
		require.Equal(t, text, Format(q))
	})
}

// TestFold holds folding to its promise on any text of lines without counters.
func TestFold(t *testing.T) {
	folded := 0
	rapid.Check(t, func(t *rapid.T) {
		var lines []string
		line := rapid.OneOf(rapid.SampledFrom([]string{"", "  a", "é 12", "}x", "00", "9 99"}), rapid.StringMatching(`[ab]{0,2}[0-9]{0,20}[ab ]`))
		for range rapid.IntRange(0, 4).Draw(t, "blocks") {
			group := rapid.SliceOfN(line, 1, 3).Draw(t, "group")
			step := rapid.IntRange(-3, 3).Draw(t, "step")
			for k := range rapid.IntRange(1, 6).Draw(t, "times") {
				for _, l := range group {
					lines = append(lines, fmt.Sprintf("%s %d k%d", l, 20+step*k, k))
				}
			}
		}
		var b strings.Builder
		foldLines(&b, lines)
		if strings.Contains(b.String(), "×") {
			folded++
		}
		var got []string
		require.NoError(t, unfold(b.String(), 1, func(_ int, l string) error {
			got = append(got, l)
			return nil
		}))
		if len(lines) > 0 {
			require.Equal(t, lines, got, b.String())
		}
	})
	require.NotZero(t, folded)
}

func TestHash(t *testing.T) {
	p, err := Parse(sound)
	require.NoError(t, err)
	h := Hash(p)
	require.Equal(t, h, Hash(p.Clone()))
	q := p.Clone()
	q.Sections[0].Phases[1].Ops[1].Attr = FillAttr{Value: 2}
	require.NotEqual(t, h, Hash(q))
}

func FuzzParse(f *testing.F) {
	// Short seeds: the fuzzer minimises each input that finds something, in a time that
	// grows with the square of its length, and would do nothing else.
	lines := strings.SplitAfter(sound, "\n")
	for _, n := range []int{1, 2, 4, 6} {
		f.Add(strings.Join(lines[:n], ""))
	}
	f.Fuzz(parsesBack)
}

// The whole of it is no seed.
func TestSoundParsesBack(t *testing.T) {
	_, err := Parse(sound)
	require.NoError(t, err)
	parsesBack(t, sound)
}

func parsesBack(t *testing.T, text string) {
	p, err := Parse(text)
	if err != nil {
		require.Contains(t, err.Error(), "line ")
		return
	}
	out := Format(p)
	q, err := Parse(out)
	require.NoError(t, err)
	require.Equal(t, out, Format(q))
	_ = Verify(p) // any answer, but an answer
}
