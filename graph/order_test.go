package graph

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// emptyProgram returns a program without well-known buffers.
func emptyProgram(mesh ...Axis) *Program {
	p := &Program{Mesh: mesh}
	for _, w := range p.wellKnown() {
		*w.id = NoBuf
	}
	return p
}

// drawProgram returns a random section over a few buffers and views, with streams, events, repeated
// phases, and partial and rank-dependent operands. It is well-formed but may have any other fault.
func drawProgram(t *rapid.T) *Program {
	p := emptyProgram(Axis{"data", rapid.IntRange(1, 3).Draw(t, "ranks")})
	ranks := int64(p.Mesh[0].Size)
	roots := rapid.IntRange(1, 3).Draw(t, "roots")
	for r := range roots {
		part := int64(rapid.IntRange(1, 3).Draw(t, "part"))
		life := Life(rapid.IntRange(0, 1).Draw(t, "life"))
		base := p.AddBuffer(Buffer{Name: fmt.Sprintf("b%d", r), DType: U8, Shape: []int64{part * ranks * 2}, Life: life, Unit: -1})
		p.AddBuffer(Buffer{Name: fmt.Sprintf("b%d.low", r), DType: U8, Shape: []int64{part * ranks}, Unit: -1, View: &View{Base: base}})
		p.AddBuffer(Buffer{Name: fmt.Sprintf("b%d.high", r), DType: U8, Shape: []int64{part * ranks}, Unit: -1, View: &View{Base: base, Offset: part * ranks}})
		own := p.AddBuffer(Buffer{Name: fmt.Sprintf("b%d.own", r), DType: U8, Shape: []int64{part}, Unit: -1, View: &View{Base: base, RankStride: part}})
		p.AddBuffer(Buffer{Name: fmt.Sprintf("b%d.own.0", r), DType: U8, Shape: []int64{1}, Unit: -1, View: &View{Base: own}})
	}
	p.Events = 4
	s := Section{Name: "s"}
	for i := range rapid.IntRange(1, 3).Draw(t, "phases") {
		ph := Phase{Name: fmt.Sprintf("p%d", i), Repeat: rapid.IntRange(0, 3).Draw(t, "repeat")}
		for k := range rapid.IntRange(0, 6).Draw(t, "ops") {
			op := Op{Kind: Copy, Name: fmt.Sprintf("op%d", k), Work: NoBuf, Skip: NoBuf, Unit: -1}
			op.Stream = StreamID(rapid.IntRange(0, 2).Draw(t, "stream"))
			buf := func() BufID { return BufID(rapid.IntRange(-1, len(p.Buffers)-1).Draw(t, "buf")) }
			op.In = []BufID{buf()}
			op.Out = []Out{{buf(), Mode(rapid.IntRange(0, 2).Draw(t, "mode"))}}
			for range rapid.IntRange(0, 2).Draw(t, "waits") {
				op.Wait = append(op.Wait, EventID(rapid.IntRange(1, p.Events).Draw(t, "wait")))
			}
			op.Record = EventID(rapid.IntRange(0, p.Events).Draw(t, "record"))
			ph.Ops = append(ph.Ops, op)
		}
		s.Phases = append(s.Phases, ph)
	}
	p.Sections = []Section{s}
	return p
}

// longRun is a section written out with up to most copies of each phase. before tells which steps
// precede which, as the closure of direct succession.
type longRun struct {
	ops    []*Op
	part   []int
	before [][]bool
}

func newLongRun(s *Section, most int) *longRun {
	r := &longRun{}
	for i := range s.Phases {
		for c := range min(s.Phases[i].Repeat, most) {
			for k := range s.Phases[i].Ops {
				r.ops = append(r.ops, &s.Phases[i].Ops[k])
				r.part = append(r.part, i*most+c)
			}
		}
	}
	n := len(r.ops)
	r.before = make([][]bool, n)
	for i := range r.before {
		r.before[i] = make([]bool, n)
	}
	for j := range n {
		direct := func(match func(*Op) bool) {
			for i := j - 1; i >= 0; i-- {
				if match(r.ops[i]) {
					r.before[i][j] = true
					for k := range i {
						r.before[k][j] = r.before[k][j] || r.before[k][i]
					}
					return
				}
			}
		}
		direct(func(o *Op) bool { return o.Stream == r.ops[j].Stream })
		for _, e := range r.ops[j].Wait {
			direct(func(o *Op) bool { return o.Record == e })
		}
	}
	return r
}

// uses visits the byte ranges that an operation touches on one rank.
func (r *longRun) uses(p *Program, i, rank int, visit func(root BufID, lo, hi int64, e Effect)) {
	Effects(r.ops[i], func(e Effect) {
		root, lo := p.Resolve(e.Buf, []int{rank})
		visit(root, lo, lo+p.Buf(e.Buf).Bytes(), e)
	})
}

// conflicts counts the unordered pairs of steps that touch a common byte on some rank, with at
// least one writing.
func (r *longRun) conflicts(p *Program) int {
	n := 0
	for j := range r.ops {
		for i := range j {
			bad := false
			for rank := range p.WorldSize() {
				r.uses(p, i, rank, func(root BufID, lo, hi int64, e Effect) {
					r.uses(p, j, rank, func(root2 BufID, lo2, hi2 int64, e2 Effect) {
						bad = bad || root == root2 && lo < hi2 && lo2 < hi && (e.Write || e2.Write)
					})
				})
			}
			if bad && !r.before[i][j] {
				n++
			}
		}
	}
	return n
}

func TestBeforeIsReachability(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawProgram(t)
		regions, err := NewRegions(p)
		require.NoError(t, err)
		tr, err := NewTrace(p, regions, &p.Sections[0])
		require.NoError(t, err)
		long := newLongRun(&p.Sections[0], 2)
		require.Len(t, tr.Steps, len(long.ops))
		for j := range tr.Steps {
			require.Same(t, long.ops[j], tr.Op(j))
			for i := range j {
				require.Equal(t, long.before[i][j], tr.Before(i, j), "%d before %d", i, j)
			}
		}
	})
}

// TestTwoCopies: two copies of a repeated phase show every conflict that more copies have. A
// program without conflicts in 2 copies has none in 5.
func TestTwoCopies(t *testing.T) {
	free := 0
	rapid.Check(t, func(t *rapid.T) {
		p := drawProgram(t)
		for i := range p.Sections[0].Phases {
			p.Sections[0].Phases[i].Repeat *= 2
		}
		if newLongRun(&p.Sections[0], 2).conflicts(p) == 0 {
			free++
			require.Zero(t, newLongRun(&p.Sections[0], 5).conflicts(p))
		}
	})
	require.NotZero(t, free, "every program drawn had conflicts")
}

// TestVerifyOrder compares Verify's verdict on order with a check of all pairs on all ranks. With
// rank-dependent parts Verify may be stricter.
func TestVerifyOrder(t *testing.T) {
	agreed := map[bool]int{}
	rapid.Check(t, func(t *rapid.T) {
		p := drawProgram(t)
		regions, err := NewRegions(p)
		require.NoError(t, err)
		tr, err := NewTrace(p, regions, &p.Sections[0])
		require.NoError(t, err)
		v := verifier{p: p, regions: regions, filled: make([]bool, len(p.Buffers))}
		for i := range v.filled {
			v.filled[i] = true // ignore errors about contents
		}
		roots := &rootUses{at: make([]int32, len(p.Buffers))}
		var failed error
		for i := range tr.Steps {
			if failed = v.step(tr, roots, i); failed != nil {
				break
			}
		}
		conflicts := newLongRun(&p.Sections[0], 2).conflicts(p)
		if conflicts > 0 {
			require.Error(t, failed)
		} else if p.Mesh[0].Size == 1 {
			require.NoError(t, failed)
		}
		agreed[failed == nil]++
	})
	require.NotZero(t, agreed[true])
	require.NotZero(t, agreed[false])
}

// TestLiveRanges follows every byte on every rank. If one use writes a byte that another reads,
// both are in one live range, and every use is in exactly one.
func TestLiveRanges(t *testing.T) {
	split := 0
	rapid.Check(t, func(t *rapid.T) {
		p := drawProgram(t)
		for i := range p.Sections[0].Phases { // programs in which half of the writes may be skipped
			for k := range p.Sections[0].Phases[i].Ops {
				if rapid.IntRange(0, 3).Draw(t, "skip") == 0 {
					p.Sections[0].Phases[i].Ops[k].Skip = 0
				}
			}
		}
		regions, err := NewRegions(p)
		require.NoError(t, err)
		tr, err := NewTrace(p, regions, &p.Sections[0])
		require.NoError(t, err)
		long := newLongRun(&p.Sections[0], 2)
		rangeOf := map[[2]int]int{} // root and step → range
		perRoot := map[BufID]int{}
		for k, r := range tr.LiveRanges() {
			perRoot[r.Buf]++
			for i, s := range r.Steps {
				if i > 0 {
					require.Less(t, r.Steps[i-1], s)
				}
				_, twice := rangeOf[[2]int{int(r.Buf), int(s)}]
				require.False(t, twice)
				rangeOf[[2]int{int(r.Buf), int(s)}] = k
			}
		}
		for _, n := range perRoot {
			split += n - 1
		}
		for rank := range p.WorldSize() {
			writers := map[[2]int64][]int{} // root and byte → steps that may have written it last
			for i := range long.ops {
				long.uses(p, i, rank, func(root BufID, lo, hi int64, e Effect) {
					mine, ok := rangeOf[[2]int{int(root), i}]
					require.True(t, ok, "step %d uses %d outside of any range", i, root)
					for b := lo; b < hi && e.Read; b++ {
						for _, w := range writers[[2]int64{int64(root), b}] {
							if p.Buf(root).Life == LifeStep || long.part[w] == long.part[i] {
								require.Equal(t, rangeOf[[2]int{int(root), w}], mine, "byte %d of %d goes from step %d to %d", b, root, w, i)
							}
						}
					}
				})
				long.uses(p, i, rank, func(root BufID, lo, hi int64, e Effect) {
					for b := lo; b < hi && e.Write; b++ {
						at := [2]int64{int64(root), b}
						if e.Fresh {
							writers[at] = nil
						}
						writers[at] = append(writers[at], i)
					}
				})
			}
		}
	})
	require.NotZero(t, split, "no buffer drawn was free in between")
}
