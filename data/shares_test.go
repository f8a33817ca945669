package data

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Ranks with uneven shares read the samples of a step in the order of the rounds: as one
// rank does, with the same padding.
func TestSharesReadTheSameSamples(t *testing.T) {
	src := counting(400)
	const batch, rows, seq = 2, 11, 3 // 6 micro-batches, and a row of padding
	read := func(t *testing.T, shares []int, ranks, accum int) (in, out [][]int32) {
		s, err := NewSampler(src, SamplerConfig{Order: Shuffled, Seed: 3, Seq: seq, Batch: batch, Accum: accum, Ranks: ranks, Shares: shares, Rows: rows})
		require.NoError(t, err)
		require.EqualValues(t, rows, s.Rows())
		for step := range 3 {
			require.EqualValues(t, step*rows, s.Tell(step))
			for round := range accum {
				for rank := range ranks {
					x, y := make([]int32, batch*seq), make([]int32, batch*seq)
					err := s.Fill(step, round, rank, x, y)
					if round >= s.Share(rank) {
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

func TestSharesAreChecked(t *testing.T) {
	for _, c := range []SamplerConfig{
		{Ranks: 2, Accum: 2, Shares: []int{2}},
		{Ranks: 2, Accum: 2, Shares: []int{0, 2}},
		{Ranks: 2, Accum: 2, Shares: []int{1, 3}},
		{Ranks: 2, Accum: 2, Shares: []int{1, 2}, Rows: 7},
	} {
		c.Seq, c.Batch = 1, 2
		_, err := NewSampler(counting(9), c)
		require.ErrorContains(t, err, "sample data", "%+v", c)
	}
}
