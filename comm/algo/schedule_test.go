package algo

import (
	"fmt"
	"testing"

	"github.com/spillway-ml/spillway/comm/algorithm"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
)

// sumOf returns comm.Adder's order of summation as text, with brackets.
func sumOf(lo, n int) string {
	if n == 1 {
		return fmt.Sprint(lo)
	}
	p := 1
	for 2*p < n {
		p *= 2
	}
	return plus(sumOf(lo, p), sumOf(lo+p, n-p))
}

func plus(a, b string) string { return "(" + a + "+" + b + ")" }

func sumList(list []string) string {
	if len(list) == 1 {
		return list[0]
	}
	p := 1
	for 2*p < len(list) {
		p *= 2
	}
	return plus(sumList(list[:p]), sumList(list[p:]))
}

// carryOut runs rounds on vectors of texts. It requires that no rank reads what another writes in
// the same round.
func carryOut(t *testing.T, rounds []comm.Round, v [][]string) [][]string {
	for k, round := range rounds {
		require.Len(t, round, len(v))
		writer := map[[2]int64]bool{} // rank, element
		for r, moves := range round {
			for _, m := range moves {
				for i := m.At; i < m.At+m.Len; i++ {
					require.False(t, writer[[2]int64{int64(r), i}], "round %d: rank %d makes element %d twice", k, r, i)
					writer[[2]int64{int64(r), i}] = true
				}
			}
		}
		next := make([][]string, len(v))
		for r := range v {
			next[r] = append([]string(nil), v[r]...)
			for _, m := range round[r] {
				for i := m.At; i < m.At+m.Len; i++ {
					var list []string
					for _, from := range m.From {
						require.True(t, from == r || !writer[[2]int64{int64(from), i}], "round %d: rank %d reads element %d of rank %d, which writes it", k, r, i, from)
						list = append(list, v[from][i])
					}
					next[r][i] = sumList(list)
				}
			}
		}
		v = next
	}
	return v
}

// Every algorithm but the ring adds in one fixed order, for any number of ranks and elements.
func TestOneBracketing(t *testing.T) {
	for _, a := range []Name{Tree, Halving, Hierarchical, Ring, Server} {
		for w := 1; w <= 17; w++ {
			for perHost := 1; perHost <= w; perHost *= 2 {
				if w%perHost != 0 || perHost > 1 && a != Hierarchical {
					continue
				}
				for _, each := range []int64{0, 1, 3} {
					n := each * int64(w)
					for op, size := range map[comm.Op]int64{comm.AllReduce: n + each, comm.ReduceScatter: n, comm.AllGather: n} {
						check(t, a, op, w, perHost, size)
					}
				}
			}
		}
	}
}

func check(t *testing.T, a Name, op comm.Op, w, perHost int, n int64) {
	what := fmt.Sprintf("%s of %d elements over %d ranks, %d a host, by %s", op, n, w, perHost, a)
	rounds, err := Rounds(a, op, w, perHost, n)
	require.NoError(t, err, what)
	v := make([][]string, w)
	part := func(r int) (lo, hi int64) { return n * int64(r) / int64(w), n * int64(r+1) / int64(w) }
	for r := range v {
		for i := range n {
			s := fmt.Sprint(r)
			if lo, hi := part(r); op == comm.AllGather && (i < lo || i >= hi) {
				s = "unset"
			}
			v[r] = append(v[r], s)
		}
	}
	v = carryOut(t, rounds, v)
	for r := range v {
		for i := range n {
			owner := 0
			for lo, hi := part(owner); i < lo || i >= hi; lo, hi = part(owner) {
				owner++
			}
			switch {
			case op == comm.AllGather:
				require.Equal(t, fmt.Sprint(owner), v[r][i], what)
			case op == comm.ReduceScatter && owner != r:
			case a == Ring:
				require.Equal(t, countAdds(sumOf(0, w)), countAdds(v[r][i]), what)
			default:
				require.Equal(t, sumOf(0, w), v[r][i], "%s: element %d at rank %d", what, i, r)
			}
		}
	}
}

func countAdds(s string) (n int) {
	for _, c := range s {
		if c == '+' {
			n++
		}
	}
	return n
}

// The bytes that a rank receives and the number of rounds are those documented at the names of the
// algorithms.
func TestCosts(t *testing.T) {
	const n = 840
	for _, c := range []struct {
		a       Name
		w, host int
		rounds  int
		most    int64 // elements that a rank receives
		between int64 // of them, from other hosts
	}{
		{Tree, 8, 1, 6, 3 * n, 0}, {Tree, 5, 1, 6, 3 * n, 0}, {Halving, 8, 1, 6, 2 * n * 7 / 8, 0}, {Ring, 7, 1, 12, 2 * n * 6 / 7, 0},
		{Server, 8, 1, 2, n*7/4 + n*3/4, 0}, {Hierarchical, 8, 4, 6, 2 * n * 7 / 8, 2 * n / 4 / 2}, {Halving, 8, 4, 6, 2 * n * 7 / 8, 2 * n / 8},
	} {
		rounds, err := Rounds(c.a, comm.AllReduce, c.w, 1, n)
		if c.a == Hierarchical {
			rounds, err = Rounds(c.a, comm.AllReduce, c.w, c.host, n)
		}
		require.NoError(t, err)
		require.Len(t, rounds, c.rounds, "%v", c)
		var most, between int64
		for r := range c.w {
			var got, far int64
			for _, round := range rounds {
				for _, m := range round[r] {
					for _, from := range m.From {
						if from != r {
							got += m.Len
							if from/c.host != r/c.host {
								far += m.Len
							}
						}
					}
				}
			}
			most, between = max(most, got), max(between, far)
		}
		require.Equal(t, c.most, most, "%v", c)
		if c.between > 0 {
			require.Equal(t, c.between, between, "%v", c)
		}
	}
}

func TestRefusals(t *testing.T) {
	_, err := Rounds(Direct, comm.AllReduce, 2, 1, 8)
	require.ErrorContains(t, err, "direct has no rounds")
	_, err = Rounds(Tree, comm.Broadcast, 2, 1, 8)
	require.ErrorContains(t, err, "broadcast has no rounds")
	_, err = Rounds(Hierarchical, comm.AllReduce, 6, 3, 8)
	require.ErrorContains(t, err, "a power of two")
	_, err = algorithm.Parse("rings")
	require.ErrorContains(t, err, `"rings": want auto, direct, tree`)
	a, err := algorithm.Parse("Ring")
	require.NoError(t, err)
	require.Equal(t, Ring, a)
}
