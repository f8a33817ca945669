package memplan

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/spillway-ml/spillway/graph"
)

// clashesPairByPair defines overlap: two live ranges of different buffers in one space, neither of
// which ends before the other starts.
func clashesPairByPair(a *Analysis) map[[2]graph.BufID]bool {
	pairs := map[[2]graph.BufID]bool{}
	for i := range a.sections {
		s := &a.sections[i]
		for x := range s.ranges {
			for y := range s.ranges[:x] {
				bx, by := s.ranges[x].Buf, s.ranges[y].Buf
				if bx == by || a.p.Buf(bx).Space != a.p.Buf(by).Space {
					continue
				}
				if !s.before(int32(x), int32(y)) && !s.before(int32(y), int32(x)) {
					pairs[[2]graph.BufID{bx, by}], pairs[[2]graph.BufID{by, bx}] = true, true
				}
			}
		}
	}
	return pairs
}

func requireSweep(t require.TestingT, p *graph.Program) {
	a, err := Analyse(p)
	require.NoError(t, err)
	a.overlap(DefaultAlign)
	got := map[[2]graph.BufID]bool{}
	for s := range a.spaces {
		sp := &a.spaces[s]
		for i, x := range sp.ids {
			for j, y := range sp.ids {
				if i != j && sp.between(int32(i), int32(j)) {
					got[[2]graph.BufID{x, y}] = true
				}
			}
		}
	}
	require.Equal(t, clashesPairByPair(a), got)
}

func TestSweepFindsWhatOverlaps(t *testing.T) {
	requireSweep(t, Transformer(9, 64, 32, 100, 4, 1, 2, true))
	requireSweep(t, Transformer(9, 64, 32, 100, 3, 2, 1, false))
	rapid.Check(t, func(t *rapid.T) { requireSweep(t, DrawProgram(t)) })
}
func TestMirror(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, n := range []int{1, 63, 64, 65, 200, 64 * mirrorTile, 64*mirrorTile + 1, 1100} {
		m := newBitRows(n, n)
		want := make([][]bool, n)
		for i := range want {
			want[i] = make([]bool, n)
		}
		for range 3 * n {
			i, j := rng.IntN(n), rng.IntN(n)
			m.row(int32(i))[j>>6] |= 1 << (j & 63)
			want[i][j], want[j][i] = true, true
		}
		m.mirror()
		for i := range want {
			for j := range want {
				require.Equal(t, want[i][j], m.row(int32(i))[j>>6]>>(j&63)&1 == 1, "%d rows, (%d, %d)", n, i, j)
			}
		}
	}
}

// before reports whether all uses of range x happen before all uses of range y.
func (s *section) before(x, y int32) bool {
	last, known := &s.last[x], &s.known[y]
	for st := range last {
		if last[st] > known[st] {
			return false
		}
	}
	return true
}
