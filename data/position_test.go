package data

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// counted is a Source whose token i is i.
type counted int64

func (c counted) Len() int64 { return int64(c) }
func (c counted) Tokens(dst []int32, start int64) error {
	for i := range dst {
		dst[i] = int32(start) + int32(i)
	}
	return nil
}

// TestSeekGoesOnWithTheNextSample checks that after Seek a run continues with the next sample, even
// with another batch, accumulation and number of ranks. All runs together read every sample once,
// in order.
func TestSeekGoesOnWithTheNextSample(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		seq := rapid.IntRange(1, 5).Draw(t, "seq")
		src := counted(rapid.Int64Range(int64(seq)+1, 200).Draw(t, "length"))
		order := rapid.SampledFrom([]Order{Sequential, Shuffled}).Draw(t, "order")
		small := func(name string) int { return rapid.IntRange(1, 3).Draw(t, name) }
		one, err := NewSampler(src, SamplerConfig{Order: order, Seed: 3, Seq: seq, Batch: 1, StepRows: StepRows{Accum: 1}, Ranks: 1})
		require.NoError(t, err)
		step, seen := 0, int64(0)
		for range 4 {
			c := SamplerConfig{Order: order, Seed: 3, Seq: seq, Batch: small("batch"), StepRows: StepRows{Accum: small("accum")}, Ranks: small("ranks")}
			s, err := NewSampler(src, c)
			require.NoError(t, err)
			require.NoError(t, s.Seek(step, seen))
			for range small("steps") {
				require.Equal(t, seen, s.Tell(step))
				in, out := make([]int32, c.Batch*seq), make([]int32, c.Batch*seq)
				for k := range c.Accum {
					for r := range c.Ranks {
						require.NoError(t, s.Fill(step, k, r, in, out))
						for b := range c.Batch {
							require.EqualValues(t, one.Start(int(seen), 0, 0, 0), in[b*seq])
							seen++
						}
					}
				}
				step++
			}
		}
	})
}

func TestSeekRefuses(t *testing.T) {
	s, err := NewSampler(counted(100), SamplerConfig{Seq: 4, Batch: 2, StepRows: StepRows{Accum: 3}, Ranks: 5})
	require.NoError(t, err)
	require.Error(t, s.Seek(-1, 0))
	require.Error(t, s.Seek(0, -1))
	require.Error(t, s.Seek(1<<60, 1<<62))
	require.NoError(t, s.Seek(10, 7))
	in := make([]int32, 8)
	require.NoError(t, s.Fill(10, 0, 0, in, make([]int32, 8)))
	require.EqualValues(t, 28, in[0])
	require.ErrorContains(t, s.Fill(3, 0, 0, in, make([]int32, 8)), "before the first sample")
	require.NoError(t, s.Seek(0, math.MaxInt64/2))
	require.Error(t, s.Fill(math.MaxInt64/60, 0, 0, in, make([]int32, 8)))
}

// TestTranslate checks the position after a change of row length. It is the token after the last
// one seen, rounded up to a row, in the same epoch.
func TestTranslate(t *testing.T) {
	s, err := NewSampler(counted(101), SamplerConfig{Seq: 10, Batch: 1, StepRows: StepRows{Accum: 1}, Ranks: 1})
	require.NoError(t, err)
	for _, c := range []struct {
		n    int64
		seq  int
		want int64
	}{{0, 5, 0}, {4, 5, 2}, {5, 5, 3}, {20, 5, 10}, {21, 5, 11}, {7, 10, 7}, {13, 10, 13}, {3, 30, 10}, {2, 30, 6}, {4, 30, 13}, {1, 1000, 0}} {
		require.Equal(t, c.want, s.Translate(c.n, c.seq), "%+v", c)
	}
}

// TestFingerprint checks that each token of small data changes the fingerprint. Of large data, the
// first and last tokens and blocks between are read.
func TestFingerprint(t *testing.T) {
	of := func(src Source) Fingerprint {
		f, err := FingerprintOf(src)
		require.NoError(t, err)
		return f
	}
	base := make([]int32, 40000)
	want := of(tokens(base))
	require.EqualValues(t, 40000, want.Tokens)
	require.Equal(t, want, of(tokens(append([]int32(nil), base...))))
	for _, at := range []int{0, 1, fingerprintBlock - 1, fingerprintBlock, 2 * fingerprintBlock, 39999} {
		other := append([]int32(nil), base...)
		other[at] = 1
		require.NotEqual(t, want, of(tokens(other)), "token %d", at)
	}
	require.NotEqual(t, want, of(tokens(base[1:])))
	large := counted(fingerprintBlock*fingerprintBlocks + 12345)
	touched := &touches{Source: large}
	of(touched)
	require.EqualValues(t, 0, touched.first)
	require.EqualValues(t, large, touched.last)
	require.EqualValues(t, fingerprintBlock*fingerprintBlocks, touched.n)
	require.NotEqual(t, of(large), of(large+1))
}

// tokens is a Source in memory.
type tokens []int32

func (s tokens) Len() int64 { return int64(len(s)) }
func (s tokens) Tokens(dst []int32, start int64) error {
	copy(dst, s[start:])
	return nil
}

// touches records the number of tokens read and their first and last position.
type touches struct {
	Source
	n, first, last int64
}

func (s *touches) Tokens(dst []int32, start int64) error {
	if s.n == 0 {
		s.first = start
	}
	s.n += int64(len(dst))
	s.last = max(s.last, start+int64(len(dst)))
	return s.Source.Tokens(dst, start)
}
