package memplan

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/spillway-ml/spillway/graph"
)

// DrawProgram returns a random program that Verify accepts. It has a few phases over several
// streams, with collectives, views, workspaces and all lifetimes. Events come from
// graph.Synchronize and barriers; then some waits are removed where Verify allows it.
func DrawProgram(t *rapid.T) *graph.Program {
	s := newSynth(rapid.IntRange(1, 3).Draw(t, "ranks"))
	p := s.p
	ranks := int64(p.Mesh[0].Size)
	pick := func(what string, lo, hi int) int { return rapid.IntRange(lo, hi).Draw(t, what) }
	f32 := func(name string, elems int64, life graph.Life, view *graph.View) graph.BufID {
		class := graph.Activations
		if life == graph.LifeRun {
			class = graph.Inputs // filled by the host
		}
		return p.AddBuffer(graph.Buffer{Name: name, DType: graph.F32, Shape: []int64{elems}, Class: class, Life: life, Unit: -1, View: view})
	}
	var whole, own []graph.BufID
	for i := range pick("buffers", 2, 8) {
		part := int64(16 * pick("size", 1, 9))
		life := graph.Life(pick("life", 0, 2))
		w := f32(fmt.Sprintf("b%d", i), part*ranks, life, nil)
		whole = append(whole, w)
		own = append(own, f32(fmt.Sprintf("b%d/own", i), part, life, &graph.View{Base: w, RankStride: part * 4}))
	}
	for i := range pick("phases", 1, 3) {
		if i > 0 || rapid.Bool().Draw(t, "barrier") {
			s.barrier(fmt.Sprintf("start%d", i))
		}
		filled := map[graph.BufID]bool{}
		for k := range pick("ops", 1, 10) {
			stream := graph.StreamID(pick("stream", 0, 2))
			a, b := whole[pick("a", 0, len(whole)-1)], whole[pick("b", 0, len(whole)-1)]
			kind := pick("kind", 0, 4)
			name := fmt.Sprintf("op%d", k)
			readable := p.Buf(a).Life == graph.LifeRun || filled[a]
			switch {
			case kind == 0 && ranks > 1 && readable:
				s.op(graph.Comm, name, ins(own[slices.Index(whole, a)]), w(a))
				s.ops[len(s.ops)-1].Kind, s.ops[len(s.ops)-1].Attr = graph.AllGather, graph.GroupAttr{}
			case kind == 1 && readable && a != b && p.Buf(a).Elems() == p.Buf(b).Elems():
				s.op(stream, name, ins(a), w(b))
				filled[b] = true
			case kind == 2 && readable:
				s.op(stream, name, ins(a), graph.Out{Buf: a, Mode: graph.ReadWrite})
				s.ops[len(s.ops)-1].Kind, s.ops[len(s.ops)-1].Attr = graph.Scale, graph.ScaleAttr{Factor: 2}
			default:
				s.op(stream, name, nil, w(a))
				s.ops[len(s.ops)-1].Kind, s.ops[len(s.ops)-1].Attr = graph.Fill, graph.FillAttr{}
				filled[a] = true
			}
			if pick("work", 0, 3) == 0 {
				s.work(int64(pick("work bytes", 1, 500)))
			}
		}
		s.phase([]string{"step", "eval"}[i/2], fmt.Sprintf("p%d", i), pick("repeat", 0, 3), nil)
	}
	require.NoError(t, graph.Verify(p))
	for range pick("removals", 0, 4) {
		q := p.Clone()
		if RemoveWait(q, pick("wait", 0, 200)) && graph.Verify(q) == nil {
			p = q
		}
	}
	return p
}

// RemoveWait removes one of the program's waits: the k-th, modulo their number.
func RemoveWait(p *graph.Program, k int) bool {
	var at []*[]graph.EventID
	var index []int
	for i := range p.Sections {
		for j := range p.Sections[i].Phases {
			ops := p.Sections[i].Phases[j].Ops
			for o := range ops {
				for n := range ops[o].Wait {
					at, index = append(at, &ops[o].Wait), append(index, n)
				}
			}
		}
	}
	if len(at) == 0 {
		return false
	}
	k %= len(at)
	*at[k] = slices.Delete(*at[k], index[k], index[k]+1)
	return true
}

// TestBoundIsTrue compares the lower bound and the floor with the best of all assignments, on
// programs of a few buffers. It tries every order of placing each buffer at its lowest place; one
// of these orders is optimal.
func TestBoundIsTrue(t *testing.T) {
	padded := 0
	rapid.Check(t, func(t *rapid.T) {
		p := DrawProgram(t)
		align := int64(1) << rapid.IntRange(0, 9).Draw(t, "align")
		l, err := Assign(p, Options{Align: align})
		require.NoError(t, err)
		a, err := Analyse(p)
		require.NoError(t, err)
		a.overlap(align)
		tl := &a.spaces[graph.Device]
		n := len(tl.ids)
		if n > 7 {
			t.Skip("too many orders")
		}
		best := int64(-1)
		pl := &placer{tl: tl}
		for _, id := range tl.ids {
			pl.size, pl.align = append(pl.size, p.Buf(id).Bytes()), append(pl.align, align)
		}
		rank := make([]int32, 0, n)
		var try func()
		try = func() {
			if len(rank) == n {
				if _, extent := pl.run(rank, lowest, &trail{}); best < 0 || extent < best {
					best = extent
				}
				return
			}
			for i := range int32(n) {
				if !slices.Contains(rank, i) {
					rank = append(rank, i)
					try()
					rank = rank[:len(rank)-1]
				}
			}
		}
		try()
		floor := a.floor[graph.Device]
		require.LessOrEqual(t, floor, max(best, 0))
		if floor == best && floor > a.bound[graph.Device].bytes-a.residentBytes[graph.Device] {
			padded++
		}
		best += a.residentBytes[graph.Device]
		require.LessOrEqual(t, l.Spaces[graph.Device].LowerBound, best)
		require.LessOrEqual(t, best, l.Spaces[graph.Device].Peak)
	})
	require.NotZero(t, padded, "alignment raised no floor to the best extent")
}
