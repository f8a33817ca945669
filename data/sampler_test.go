package data

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/alloctest"
)

// counting is a Source whose token i is i.
type counting int64

func (c counting) Len() int64 { return int64(c) }

func (c counting) Tokens(dst []int32, start int64) error {
	if start < 0 || start+int64(len(dst)) > int64(c) {
		return fmt.Errorf("%d tokens from %d of %d", len(dst), start, c)
	}
	for i := range dst {
		dst[i] = int32(start + int64(i))
	}
	return nil
}

// TestSequentialIsTheFormula compares positions with the documented formula, computed with big
// integers.
func TestSequentialIsTheFormula(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for range 300 {
		c := SamplerConfig{Seq: 1 + rng.IntN(9), Batch: 1 + rng.IntN(4), StepRows: StepRows{Accum: 1 + rng.IntN(3)}, Ranks: 1 + rng.IntN(5)}
		length := int64(c.Seq) + 1 + rng.Int64N(200)
		s, err := NewSampler(counting(length), c)
		require.NoError(t, err)
		in, out := make([]int32, c.Batch*c.Seq), make([]int32, c.Batch*c.Seq)
		step, k, r := rng.IntN(1000), rng.IntN(c.Accum), rng.IntN(c.Ranks)
		if rng.IntN(4) == 0 {
			step = int(rng.Int64N(math.MaxInt64 / int64(c.Batch*c.Accum*c.Ranks+1)))
		}
		require.NoError(t, s.Fill(step, k, r, in, out))
		for b := range c.Batch {
			row := big.NewInt(int64(step))
			for _, f := range [][2]int{{c.Accum, k}, {c.Ranks, r}, {c.Batch, b}} {
				row.Mul(row, big.NewInt(int64(f[0]))).Add(row, big.NewInt(int64(f[1])))
			}
			require.Equal(t, row.Int64(), s.GlobalSample(step, k, r, b))
			row.Mul(row, big.NewInt(int64(c.Seq)))
			start := row.Mod(row, big.NewInt((length-1)/int64(c.Seq)*int64(c.Seq))).Int64()
			require.Equal(t, start, s.Start(step, k, r, b))
			for i := range c.Seq {
				require.Equal(t, int32(start)+int32(i), in[b*c.Seq+i])
				require.Equal(t, int32(start)+int32(i)+1, out[b*c.Seq+i])
			}
		}
	}
}

// TestShuffledIsAPermutationPerEpoch checks that each epoch reads each window once, for any split
// into batches. The samples depend on the global batch only.
func TestShuffledIsAPermutationPerEpoch(t *testing.T) {
	for _, windows := range []int64{1, 2, 3, 5, 16, 17, 100, 1023} {
		const seq = 4
		source := counting(windows*seq + 1 + 3) // the last 3 tokens are in no window
		order := func(batch, accum, ranks int, samples int64) (all []int64) {
			s, err := NewSampler(source, SamplerConfig{Order: Shuffled, Seed: 42, Seq: seq, Batch: batch, StepRows: StepRows{Accum: accum}, Ranks: ranks})
			require.NoError(t, err)
			require.Equal(t, windows, s.Windows())
			in, out := make([]int32, batch*seq), make([]int32, batch*seq)
			for step := 0; int64(len(all)) < samples; step++ {
				for k := range accum {
					for r := range ranks {
						require.NoError(t, s.Fill(step, k, r, in, out))
						for b := range batch {
							all = append(all, int64(in[b*seq])/seq)
							require.Equal(t, in[b*seq]+1, out[b*seq])
						}
					}
				}
			}
			return all[:samples]
		}
		all := order(1, 1, 1, 3*windows)
		for e := range 3 {
			epoch := slices.Clone(all[int64(e)*windows : int64(e+1)*windows])
			slices.Sort(epoch)
			for i, w := range epoch {
				require.Equal(t, int64(i), w)
			}
		}
		require.Equal(t, all, order(3, 2, 5, 3*windows))
		require.Equal(t, all, order(5, 3, 2, 3*windows))
		if windows >= 16 {
			require.NotEqual(t, all[:windows], all[windows:2*windows], "epochs differ")
			require.False(t, slices.IsSorted(all[:windows]))
		}
	}
}

func shuffledBy(t *testing.T, seed int64, windows counting) *Sampler {
	s, err := NewSampler(windows+1, SamplerConfig{Order: Shuffled, Seed: seed, Seq: 1, Batch: 1, StepRows: StepRows{Accum: 1}, Ranks: 1})
	require.NoError(t, err)
	return s
}

// TestShuffledEpochsInAnyOrder checks that steps can be read in any order, as a resumed run does.
func TestShuffledEpochsInAnyOrder(t *testing.T) {
	const windows = 50
	s := shuffledBy(t, 7, windows)
	want := make([]int64, 4*windows)
	for i := range want {
		want[i] = shuffledBy(t, 7, windows).Start(i, 0, 0, 0)
	}
	for _, i := range rand.Perm(len(want)) {
		require.Equal(t, want[i], s.Start(i, 0, 0, 0))
	}
	// The largest seed wraps instead of failing.
	require.NotPanics(t, func() { shuffledBy(t, math.MaxInt64, windows).Start(3*windows, 0, 0, 0) })
}

// TestSeedsShareNoEpoch checks that no epoch of one seed equals an epoch of another. In version 1,
// epoch e of seed s was epoch 0 of seed s+e. Checkpoints of version 1, or without a version,
// continue with that order.
func TestSeedsShareNoEpoch(t *testing.T) {
	const windows, seeds, epochs = 50, 12, 12
	of := func(s *Sampler, e int) string {
		order := make([]int64, windows)
		for i := range order {
			order[i] = s.Start(e*windows+i, 0, 0, 0)
		}
		return fmt.Sprint(order)
	}
	seen := map[string]bool{}
	for seed := range int64(seeds) {
		s := shuffledBy(t, seed, windows)
		require.Equal(t, Epochs, s.EpochsVersion())
		for e := range epochs {
			order := of(s, e)
			require.False(t, seen[order], "epoch %d of seed %d", e, seed)
			seen[order] = true
		}
	}
	for _, version := range []int{0, 1} {
		old := shuffledBy(t, 7, windows)
		old.Start(3*windows, 0, 0, 0) // cache an epoch of the new version
		require.NoError(t, old.UseEpochs(version))
		require.Equal(t, 1, old.EpochsVersion())
		for e := range 4 {
			require.Equal(t, of(shuffledBy(t, 7+int64(e), windows), 0), of(old, e))
		}
		require.NoError(t, old.UseEpochs(2))
		require.Equal(t, of(shuffledBy(t, 7, windows), 3), of(old, 3))
	}
	require.ErrorContains(t, shuffledBy(t, 7, windows).UseEpochs(3), "version 3 are unknown, the newest here is 2")
}

// TestEpochKeysAreFixed: the epoch keys of a version must never change, because the positions in
// checkpoints depend on them.
func TestEpochKeysAreFixed(t *testing.T) {
	require.EqualValues(t, 12, epochKey(1, 7, 5))
	require.EqualValues(t, 7, epochKey(2, 7, 0))
	require.EqualValues(t, uint64(0x5692161d100b05e5)+7, epochKey(2, 7, 1))
}

// TestPermutationIsFixed: these values must never change, because the positions in checkpoints
// depend on them.
func TestPermutationIsFixed(t *testing.T) {
	for _, tc := range []struct {
		seed, n uint64
		want    []uint64
	}{
		{0, 10, []uint64{2, 0, 8, 1, 9, 7, 4, 5, 6, 3}},
		{1, 10, []uint64{1, 6, 8, 0, 3, 5, 2, 7, 4, 9}},
		{1, 1_000_000_007, []uint64{994357380, 23159423, 224855304, 527056017}},
		{math.MaxUint64, 1 << 40, []uint64{958358442345, 403149525981, 742261324172, 177815507945}},
	} {
		p := newPermutation(tc.seed, tc.n)
		var got []uint64
		for i := range uint64(len(tc.want)) {
			got = append(got, p.at(i))
		}
		require.Equal(t, tc.want, got, "seed %d, n %d", tc.seed, tc.n)
	}
}

func TestPermutationIsABijection(t *testing.T) {
	for n := uint64(1); n < 300; n++ {
		p := newPermutation(n*7, n)
		seen := make([]bool, n)
		for i := range n {
			x := p.at(i)
			require.Less(t, x, n)
			require.False(t, seen[x], "n %d: %d twice", n, x)
			seen[x] = true
		}
	}
	p := newPermutation(1, math.MaxInt64)
	require.Less(t, p.at(math.MaxInt64-1), uint64(math.MaxInt64))
}

// TestPermutationIsUniform checks that over all seeds each place gets each window equally often. It
// is a chi-square test with 16·15 degrees of freedom, whose 99.99 % quantile is about 328.
func TestPermutationIsUniform(t *testing.T) {
	const n, seeds = 16, 16 * 400
	var count [n][n]float64
	for seed := range uint64(seeds) {
		p := newPermutation(seed, n)
		for i := range uint64(n) {
			count[i][p.at(i)]++
		}
	}
	chi := 0.0
	for i := range count {
		for _, c := range count[i] {
			d := c - seeds/n
			chi += d * d / (seeds / n)
		}
	}
	require.Less(t, chi, 328.0)
	// Neighbours are not kept: a window is followed by its successor in 1 of n places.
	p := newPermutation(3, 100_000)
	follows := 0
	for i := range uint64(99_999) {
		if p.at(i)+1 == p.at(i+1) {
			follows++
		}
	}
	require.Less(t, follows, 12)
}

type masked struct{ counting }

func (m masked) Targets(dst []int32, start int64) error {
	for i := range dst {
		dst[i] = -1
		if (start+int64(i))%3 == 0 {
			dst[i] = int32(start) + int32(i)
		}
	}
	return nil
}

func TestCustomTargets(t *testing.T) {
	c := SamplerConfig{Seq: 6, Batch: 1, StepRows: StepRows{Accum: 1}, Ranks: 1, Vocab: 13}
	s, err := NewSampler(masked{13}, c)
	require.NoError(t, err)
	in, out := make([]int32, 6), make([]int32, 6)
	require.NoError(t, s.Fill(1, 0, 0, in, out))
	require.Equal(t, []int32{6, 7, 8, 9, 10, 11}, in)
	require.Equal(t, []int32{6, -1, -1, 9, -1, -1}, out)
	s, err = NewSampler(masked{10}, SamplerConfig{Seq: 9, Batch: 1, StepRows: StepRows{Accum: 1}, Ranks: 1, Vocab: 9})
	require.NoError(t, err)
	in, out = make([]int32, 9), make([]int32, 9)
	require.NoError(t, s.Fill(0, 0, 0, in, out), "inputs and targets stay below 9")
}

func TestSamplerErrors(t *testing.T) {
	good := SamplerConfig{Seq: 4, Batch: 2, StepRows: StepRows{Accum: 2}, Ranks: 3}
	for name, tc := range map[string]struct {
		n    counting
		edit func(*SamplerConfig)
		want string
	}{
		"seq 0":    {100, func(c *SamplerConfig) { c.Seq = 0 }, "seq is 0"},
		"batch":    {100, func(c *SamplerConfig) { c.Batch = -1 }, "batch is -1"},
		"accum":    {100, func(c *SamplerConfig) { c.Accum = 0 }, "accum is 0"},
		"ranks":    {100, func(c *SamplerConfig) { c.Ranks = 0 }, "ranks is 0"},
		"order":    {100, func(c *SamplerConfig) { c.Order = 7 }, "Order(7)"},
		"vocab":    {100, func(c *SamplerConfig) { c.Vocab = -1 }, "vocabulary of -1"},
		"overflow": {100, func(c *SamplerConfig) { c.Batch, c.Accum, c.Ranks = 1<<30, 1<<30, 1<<30 }, "2^63"},
		"short":    {4, func(c *SamplerConfig) {}, "4 tokens, under one row of 4 and its last target; give 5 tokens at least, or a seq of 3"},
		"none":     {0, func(c *SamplerConfig) {}, "0 tokens"},
	} {
		c := good
		tc.edit(&c)
		_, err := NewSampler(tc.n, c)
		require.ErrorContains(t, err, tc.want, name)
	}
	s, err := NewSampler(counting(5), good)
	require.NoError(t, err, "one window is enough")
	in, out := make([]int32, 8), make([]int32, 8)
	require.NoError(t, s.Fill(5, 1, 2, in, out))
	require.ErrorContains(t, s.Fill(-1, 0, 0, in, out), "step -1")
	require.ErrorContains(t, s.Fill(math.MaxInt, 0, 0, in, out), "step")
	require.ErrorContains(t, s.Fill(0, 2, 0, in, out), "micro-batch 2; it must be 0 to 1")
	require.ErrorContains(t, s.Fill(0, 0, 3, in, out), "rank 3; it must be 0 to 2")
	require.ErrorContains(t, s.Fill(0, 0, -1, in, out), "rank -1")
	require.ErrorContains(t, s.Fill(0, 0, 0, in[:7], out), "7 inputs")
	require.ErrorContains(t, s.Fill(0, 0, 0, in, out[:7]), "7 targets")

	good.Vocab = 10
	s, err = NewSampler(counting(100), good)
	require.NoError(t, err)
	require.NoError(t, s.Fill(0, 0, 0, in, out))
	err = s.Fill(0, 0, 1, in, out) // the rows start at tokens 8 and 12
	require.ErrorContains(t, err, "token 10 is 10, beyond the vocabulary of 10; it must be 0 to 9")

	for _, o := range []Order{Sequential, Shuffled} {
		back, err := ParseOrder(o.String())
		require.NoError(t, err)
		require.Equal(t, o, back)
	}
	_, err = ParseOrder("random")
	require.ErrorContains(t, err, `"random"`)
}

func TestFillAllocatesNothing(t *testing.T) {
	for _, o := range []Order{Sequential, Shuffled} {
		s, err := NewSampler(counting(1000), SamplerConfig{Order: o, Seq: 16, Batch: 4, StepRows: StepRows{Accum: 1}, Ranks: 2, Vocab: 1000})
		require.NoError(t, err)
		in, out := make([]int32, 64), make([]int32, 64)
		require.Zero(t, alloctest.PerRun(50, func() { s.Fill(3, 0, 1, in, out) }), o)
	}
}
