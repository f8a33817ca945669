package graph

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// A run has waits only at its start and records only at its end, is as long as possible, and
// crosses no cut.
func TestRuns(t *testing.T) {
	ops := []Op{
		{Stream: Compute}, {Stream: Compute}, {Stream: CopyIn, Record: 1}, {Stream: Compute}, // 0, 1, 3
		{Stream: Compute, Wait: []EventID{1}}, {Stream: Compute, Record: 2}, // 4, 5
		{Stream: Compute}, {Stream: Compute}, {Stream: Compute}, // 6 | 8: 7 is none
	}
	in := func(i int) bool { return i != 7 }
	require.Equal(t, [][]int{{0, 1, 3}, {4, 5}}, Runs(ops, Compute, 2, in, nil))
	require.Equal(t, [][]int{{4, 5}}, Runs(ops, Compute, 2, in, []int{1, 3}))
	require.Equal(t, [][]int{{0, 1, 3}}, Runs(ops, Compute, 3, in, []int{4}))
	require.Empty(t, Runs(nil, Compute, 1, in, []int{0}))

	rapid.Check(t, func(t *rapid.T) {
		ops := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) Op {
			op := Op{Stream: StreamID(rapid.IntRange(0, 1).Draw(t, "stream"))}
			if rapid.IntRange(0, 3).Draw(t, "wait") == 0 {
				op.Wait = []EventID{1}
			}
			if rapid.IntRange(0, 3).Draw(t, "record") == 0 {
				op.Record = 1
			}
			return op
		}), 0, 30).Draw(t, "ops")
		cut := rapid.IntRange(0, 30).Draw(t, "cut")
		seen := -1
		for _, run := range Runs(ops, Compute, 1, func(int) bool { return true }, []int{cut}) {
			for k, i := range run {
				require.Greater(t, i, seen, "each operation once, in order")
				seen = i
				require.Equal(t, Compute, ops[i].Stream)
				require.True(t, k == 0 || len(ops[i].Wait) == 0)
				require.True(t, k == len(run)-1 || ops[i].Record == 0)
				require.Equal(t, run[0] < cut, i < cut)
			}
		}
	})
}

// A pair is two neighbouring operations on a stream, without a record between them and without a
// predicate. No operation is in two pairs.
func TestPairs(t *testing.T) {
	plain := Op{Stream: Compute, Skip: NoBuf}
	recording, waiting, other, skipped, join := plain, plain, plain, plain, plain
	recording.Record, waiting.Wait, other.Stream, skipped.Skip, join.Kind = 1, []EventID{1}, Comm, 3, Join
	all := func(int, int) bool { return true }
	for _, c := range []struct {
		ops  []Op
		want [][2]int
	}{
		{[]Op{plain, plain, plain}, [][2]int{{0, 1}}},
		{[]Op{plain, plain, plain, plain}, [][2]int{{0, 1}, {2, 3}}},
		{[]Op{plain, other, waiting}, [][2]int{{0, 2}}},
		{[]Op{waiting, recording, plain}, [][2]int{{0, 1}}},
		{[]Op{recording, plain, recording}, [][2]int{{1, 2}}},
		{[]Op{plain, skipped, plain, plain}, [][2]int{{2, 3}}},
		{[]Op{plain, join, plain}, nil},
		{[]Op{other, other}, nil},
	} {
		require.Equal(t, c.want, Pairs(c.ops, Compute, all))
	}
	var asked [][2]int
	require.Empty(t, Pairs([]Op{plain, other, plain, plain}, Compute, func(i, j int) bool {
		asked = append(asked, [2]int{i, j})
		return false
	}))
	require.Equal(t, [][2]int{{0, 2}, {2, 3}}, asked)
}
