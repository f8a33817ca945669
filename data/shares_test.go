package data

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSharesReadTheSameSamples checks that ranks with uneven shares read the samples of a step in
// round order. Samples and padding must equal those of one rank.
func TestSharesReadTheSameSamples(t *testing.T) {
	src := counting(400)
	const batch, rows, seq = 2, 11, 3 // 6 micro-batches, and a row of padding
	read := func(t *testing.T, shares []int, ranks, accum int) (in, out [][]int32) {
		s, err := NewSampler(src, SamplerConfig{Order: Shuffled, Seed: 3, Seq: seq, Batch: batch, Ranks: ranks, StepRows: StepRows{Accum: accum, Shares: shares, Rows: rows}})
		require.NoError(t, err)
		require.EqualValues(t, rows, s.Rows(0))
		for step := range 3 {
			require.EqualValues(t, step*rows, s.Tell(step))
			for round := range accum {
				for rank := range ranks {
					x, y := make([]int32, batch*seq), make([]int32, batch*seq)
					err := s.Fill(step, round, rank, x, y)
					if round >= s.Share(step, rank) {
						require.ErrorContains(t, err, "micro-batch")
						continue
					}
					require.NoError(t, err)
					in, out = append(in, x), append(out, y)
				}
			}
		}
		return in, out
	}
	in, out := read(t, nil, 1, 6)
	require.Len(t, in, 3*6)
	require.Equal(t, []int32{0, 0, 0}, in[5][seq:])
	require.Equal(t, []int32{-1, -1, -1}, out[5][seq:])
	require.NotContains(t, out[4], int32(-1))
	for _, shares := range [][]int{nil, {1, 3, 2}, {4, 2}, {2, 1, 1, 1, 1}, {1, 1, 4}} {
		ranks, accum := len(shares), 0
		for _, n := range shares {
			accum = max(accum, n)
		}
		if shares == nil {
			ranks, accum = 3, 2
		}
		x, y := read(t, shares, ranks, accum)
		require.Equal(t, in, x, "%v", shares)
		require.Equal(t, out, y, "%v", shares)
	}
}

// TestStepsOfOtherRows checks a schedule of steps with different numbers of rows. Each step must
// start at the sample after the previous step, also after a Seek.
func TestStepsOfOtherRows(t *testing.T) {
	c := SamplerConfig{Seq: 2, Batch: 2, Ranks: 2, StepRows: StepRows{Accum: 1},
		Later: []RowsFrom{{2, StepRows{Accum: 2, Shares: []int{2, 1}, Rows: 5}}, {3, StepRows{Accum: 3}}}}
	s, err := NewSampler(counting(400), c)
	require.NoError(t, err)
	for step, want := range []struct{ rows, before, leaves int64 }{{4, 0, 2}, {4, 4, 2}, {5, 8, 3}, {12, 13, 6}, {12, 25, 6}} {
		require.Equal(t, want.rows, s.Rows(step), "step %d", step)
		require.Equal(t, want.before, s.Tell(step), "step %d", step)
		seen := map[int64]bool{}
		leaves := int64(0)
		require.NoError(t, s.EachMicro(step, func(micro, rank int) error {
			leaves++
			in, out := make([]int32, 4), make([]int32, 4)
			require.NoError(t, s.Fill(step, micro, rank, in, out))
			for row := range 2 {
				if s.IsPadding(step, micro, rank, row) {
					require.Equal(t, []int32{-1, -1}, out[2*row:][:2])
					continue
				}
				seen[s.GlobalSample(step, micro, rank, row)] = true
			}
			return nil
		}))
		require.Equal(t, want.leaves, leaves)
		require.Len(t, seen, int(want.rows))
		for i := range want.rows {
			require.True(t, seen[want.before+i], "step %d has no sample %d", step, want.before+i)
		}
	}
	for sample, step := range map[int64]int{0: 0, 1: 1, 4: 1, 8: 2, 9: 3, 13: 3, 14: 4, 25: 4, 26: 5, 37: 5} {
		require.Equal(t, step, s.StepAt(sample), "sample %d", sample)
	}
	require.Equal(t, 1, s.Share(2, 1))
	require.Equal(t, 3, s.Share(3, 1))
	require.NoError(t, s.Seek(2, 100))
	require.EqualValues(t, 100, s.Tell(2))
	require.EqualValues(t, 105, s.Tell(3))
	require.EqualValues(t, 129, s.Tell(5))
	require.ErrorContains(t, s.Seek(1<<61, 0), "2^63")
}

func TestSharesAreChecked(t *testing.T) {
	for _, c := range []SamplerConfig{
		{Ranks: 2, StepRows: StepRows{Accum: 2, Shares: []int{2}}},
		{Ranks: 2, StepRows: StepRows{Accum: 2, Shares: []int{0, 2}}},
		{Ranks: 2, StepRows: StepRows{Accum: 2, Shares: []int{1, 3}}},
		{Ranks: 2, StepRows: StepRows{Accum: 2, Shares: []int{1, 2}, Rows: 7}},
		{Ranks: 2, StepRows: StepRows{Accum: 2}, Later: []RowsFrom{{0, StepRows{Accum: 1}}}},
		{Ranks: 2, StepRows: StepRows{Accum: 2}, Later: []RowsFrom{{4, StepRows{Accum: 1}}, {4, StepRows{Accum: 3}}}},
		{Ranks: 2, StepRows: StepRows{Accum: 2}, Later: []RowsFrom{{4, StepRows{}}}},
		{Ranks: 2, StepRows: StepRows{Accum: 2}, Later: []RowsFrom{{1 << 62, StepRows{Accum: 2}}}},
	} {
		c.Seq, c.Batch = 1, 2
		_, err := NewSampler(counting(9), c)
		require.ErrorContains(t, err, "sample data", "%+v", c)
	}
}
