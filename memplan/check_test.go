package memplan_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/layouts"
	"github.com/spillway-ml/spillway/internal/testkit/progtext"
	"github.com/spillway-ml/spillway/memplan"
)

func parse(t *testing.T, text string) *graph.Program {
	p, err := progtext.Parse(progtext.Header + "\n" + text)
	require.NoError(t, err)
	return p
}

func cloneLayout(l *memplan.Layout) *memplan.Layout {
	m := *l
	m.Offset = slices.Clone(l.Offset)
	return &m
}

// TestCheckCatches makes a valid layout invalid in every way that Check must detect.
func TestCheckCatches(t *testing.T) {
	p := parse(t, `
mesh data=2
buffer w f32 [64] device inputs run
buffer x f32 [128] device activations phase
buffer y f32 [128] device activations phase
buffer y.low f32 [64] device activations phase view=y
buffer z f32 [128] device activations phase
section step
phase main ×1
  x: fill -> x {}
  y: copy x -> y
  z: copy y -> z
  w: add w y.low -> ~w
  end: copy z -> y
`)
	require.NoError(t, graph.Verify(p))
	good, err := memplan.Assign(p, memplan.Options{})
	require.NoError(t, err)
	require.NoError(t, layouts.Check(p, good))
	w, x, y, low, z := 0, 1, 2, 3, 4
	dev := graph.Device
	require.Equal(t, good.Offset[x], good.Offset[z], "x and z share their place")
	for _, c := range []struct {
		name  string
		spoil func(l *memplan.Layout)
		err   string
	}{
		{"overlap", func(l *memplan.Layout) { l.Offset[x] = l.Offset[y] }, `x is in use from step/main/x to step/main/y, and y at step/main/y, with nothing that keeps them apart`},
		{"overlap in part", func(l *memplan.Layout) { l.Offset[x] += 256 }, `with nothing that keeps them apart`},
		{"overlap with a state", func(l *memplan.Layout) { l.Offset[w] = l.Offset[z] }, `overlap, and one of them lives all the time`},
		{"alignment", func(l *memplan.Layout) { l.Offset[x] += 64 }, `x has offset`},
		{"no place", func(l *memplan.Layout) { l.Offset[x] = -1 }, `x has offset -1, but it is used`},
		{"place of a view", func(l *memplan.Layout) { l.Offset[low] = 0 }, `y.low has offset 0, want -1`},
		{"above the peak", func(l *memplan.Layout) { l.Offset[y] += 1 << 20 }, `y ends at byte`},
		{"peak too high", func(l *memplan.Layout) { l.Spaces[dev].Peak++; l.Spaces[dev].ByClass[graph.Padding]++ }, `bytes of padding at the peak`},
		{"peak that nothing reaches", func(l *memplan.Layout) {
			l.Spaces[dev].Peak++
			l.Spaces[dev].ByClass[graph.Padding]++
			l.Spaces[dev].ClassPeak[graph.Padding]++
		}, `the peak is 1281, but the highest buffer ends at byte 1280`},
		{"classes", func(l *memplan.Layout) { l.Spaces[dev].ByClass[graph.Activations] -= 4 }, `the classes sum to 1276 at the peak of 1280`},
		{"bound", func(l *memplan.Layout) { l.Spaces[dev].LowerBound = 1281 }, `the lower bound 1281 is above the peak 1280`},
		{"length", func(l *memplan.Layout) { l.Offset = l.Offset[1:] }, `the layout has 4 offsets, want one for each of the program's 5 buffers`},
		{"alignment of the layout", func(l *memplan.Layout) { l.Align = 3 }, `alignment 3 is not a power of two`},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := cloneLayout(good)
			c.spoil(l)
			require.ErrorContains(t, layouts.Check(p, l), c.err)
		})
	}
}

// TestCheckCatchesRemovedWait removes a wait whose only purpose is to keep b from using a's place
// before the copy of a is done. Verify accepts the program without it, so Check must refuse the
// layout.
func TestCheckCatchesRemovedWait(t *testing.T) {
	p := parse(t, `
events 2
buffer a f32 [64] device activations phase
buffer b f32 [64] device activations phase
buffer host f32 [64] host activations run
section step
phase main ×1
  a: fill -> a {} record=1
  out: copy a -> host @copy-out wait=1 record=2
  b: fill -> b {} wait=2
`)
	l, err := memplan.Assign(p, memplan.Options{})
	require.NoError(t, err)
	require.Equal(t, l.Offset[0], l.Offset[1])
	require.NoError(t, layouts.Check(p, l))
	q := p.Clone()
	q.Sections[0].Phases[0].Ops[2].Wait = nil
	require.NoError(t, graph.Verify(q))
	require.ErrorContains(t, layouts.Check(q, l), "a is in use from step/main/a to step/main/out, and b at step/main/b, with nothing that keeps them apart")

	// Use after release: a is read again after b has taken its place.
	q = p.Clone()
	op := q.Sections[0].Phases[0].Ops[1]
	op.Name, op.Wait = "late", nil
	q.Sections[0].Phases[0].Ops = append(q.Sections[0].Phases[0].Ops, op)
	require.NoError(t, graph.Verify(q))
	require.ErrorContains(t, layouts.Check(q, l), "nothing that keeps them apart")
}

// TestMutateTransformer makes many single changes to the plan of a training step, which Check must
// detect.
func TestMutateTransformer(t *testing.T) {
	p := memplan.Transformer(2, 64, 32, 512, 2, 1, 3, false)
	require.NoError(t, graph.Verify(plainKinds(p)))
	l, err := memplan.Assign(p, memplan.Options{})
	require.NoError(t, err)
	require.NoError(t, layouts.Check(p, l))

	// Move one of two buffers that are alive at the peak onto the other.
	for _, x := range l.Spaces[graph.Device].Live {
		for _, y := range l.Spaces[graph.Device].Live {
			end := l.Offset[y] + p.Buf(x).Bytes()
			if x == y || end > l.Spaces[graph.Device].Peak {
				continue
			}
			m := cloneLayout(l)
			m.Offset[x] = l.Offset[y]
			require.Error(t, layouts.Check(p, m), "%s on %s", p.Buf(x).Name, p.Buf(y).Name)
		}
	}
	// Remove each wait: Verify refuses the program, or Check the layout, or the wait was redundant.
	// Each case must occur.
	data, places, spare := 0, 0, 0
	for k := range waits(p) {
		q := p.Clone()
		require.True(t, memplan.RemoveWait(q, k))
		switch {
		case graph.Verify(plainKinds(q)) != nil:
			data++
		case layouts.Check(q, l) != nil:
			places++
		default:
			spare++
		}
	}
	t.Logf("of the waits %d order data, %d places, %d neither", data, places, spare)
	require.NotZero(t, data)
	require.NotZero(t, places)
}

func waits(p *graph.Program) (n int) {
	for i := range p.Sections {
		for j := range p.Sections[i].Phases {
			for _, op := range p.Sections[i].Phases[j].Ops {
				n += len(op.Wait)
			}
		}
	}
	return n
}

// plainKinds replaces each operation of a synthetic program by joins, byte copies and fills that
// touch the same buffers in the same order. Verify then judges only order and contents. Each input
// is copied to a byte of its own.
func plainKinds(p *graph.Program) *graph.Program {
	q := p.Clone()
	for i := range q.Sections {
		for j := range q.Sections[i].Phases {
			ph := &q.Sections[i].Phases[j]
			var ops []graph.Op
			for _, op := range ph.Ops {
				var parts []graph.Op
				part := func(kind graph.Kind, attr any) *graph.Op {
					parts = append(parts, graph.Op{Kind: kind, Attr: attr, Stream: op.Stream, Work: graph.NoBuf, Skip: graph.NoBuf, Unit: -1,
						Name: op.Name + "." + string(rune('a'+len(parts)))})
					return &parts[len(parts)-1]
				}
				part(graph.Join, nil).Wait = op.Wait
				read := func(id graph.BufID) {
					sink := *q.Buf(id)
					sink.Name, sink.View, sink.Life, sink.Class = op.Name+".sink", nil, graph.LifePhase, graph.Workspace
					o := part(graph.Copy, nil)
					o.In, o.Out = []graph.BufID{id}, []graph.Out{{Buf: q.AddBuffer(sink)}}
				}
				for _, id := range op.In {
					read(id)
				}
				for _, o := range op.Out {
					if o.Mode != graph.Write {
						read(o.Buf)
					}
					part(graph.Fill, graph.FillAttr{}).Out = []graph.Out{{Buf: o.Buf}}
				}
				if op.Work != graph.NoBuf {
					part(graph.Fill, graph.FillAttr{}).Out = []graph.Out{{Buf: op.Work}}
				}
				part(graph.Join, nil).Record = op.Record
				ops = append(ops, parts...)
			}
			ph.Ops = ops
		}
	}
	return q
}

// TestRandom: Assign can plan every program that Verify accepts, and Check accepts the plan. The
// extent is between the lower bound and the sum of all buffers. Planning again gives the same
// layout.
func TestRandom(t *testing.T) {
	shared, removed := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		p := memplan.DrawProgram(t)
		align := int64(1) << rapid.IntRange(0, 9).Draw(t, "align")
		l, err := memplan.Assign(p, memplan.Options{Align: align})
		require.NoError(t, err)
		require.NoError(t, layouts.Check(p, l))
		again, err := memplan.Assign(p, memplan.Options{Align: align})
		require.NoError(t, err)
		require.Equal(t, l, again)
		for sp, u := range l.Spaces {
			require.GreaterOrEqual(t, u.Peak, u.LowerBound)
			all, live := int64(0), int64(0)
			for id, off := range l.Offset {
				if off >= 0 && p.Buffers[id].Space == graph.Space(sp) {
					all += (p.Buffers[id].Bytes() + align - 1) / align * align
				}
			}
			require.LessOrEqual(t, u.Peak, all)
			for _, id := range u.Live {
				live += p.Buf(id).Bytes()
			}
			require.Equal(t, u.LowerBound, live)
			if u.Peak < all-align {
				shared++
			}
		}
		// Without one of its waits, the program is refused by Verify, or its old layout by Check,
		// or the wait was redundant.
		q := p.Clone()
		if !memplan.RemoveWait(q, rapid.IntRange(0, 200).Draw(t, "wait")) || graph.Verify(q) != nil {
			return
		}
		m, err := memplan.Assign(q, memplan.Options{Align: align})
		require.NoError(t, err)
		require.NoError(t, layouts.Check(q, m))
		if layouts.Check(q, l) != nil {
			removed++
			require.NotEqual(t, l, m)
		}
	})
	require.NotZero(t, shared, "no two buffers shared bytes")
	t.Logf("in %d programs a wait ordered nothing but the reuse of bytes", removed)
}
