package gemm

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/kernels/cpu/level"
)

// The blocking of every kernel, including those for other CPUs, fits into the workspace. The
// workspace is the same for all.
func TestBlockingFitsTheWorkspace(t *testing.T) {
	size := func(r *rand.Rand) int {
		most := []int{40, 300, 5000, 60000}[r.IntN(4)]
		return 1 + r.IntN(most)
	}
	r := rand.New(rand.NewPCG(9, 9))
	base := kernels{lanes: 16, group: 1, depth: 1, tileRows: 168, tileCols: 128}
	for range long.Or(4000, 20000) {
		s := Spec{M: size(r), N: size(r), K: size(r), TransA: r.IntN(2) == 0, TransB: r.IntN(2) == 0, In: Type(r.IntN(5)), Out: F32}
		if s.In.integer() {
			s.Out = I32
		} else if r.IntN(2) == 0 {
			s.Out = BF16
		}
		portable, avx2, avx512, tiles := base, base, base, base
		portable.mr, portable.nr = 2, 8
		avx2.mr, avx2.nr, avx2.level = 6, 16, level.AVX2
		avx512.mr, avx512.nr, avx512.level = 14, 32, level.AVX512
		tiles.form, tiles.mr, tiles.nr, tiles.depth, tiles.tileRows = formTiles, 32, 32, 16, 256
		groups := []int{1}
		switch {
		case s.In == BF16:
			groups = []int{1, 2}
		case s.In.integer():
			groups = []int{2, 4}
		}
		for _, k := range []kernels{portable, avx2, avx512, tiles} {
			k.group = groups[r.IntN(len(groups))]
			if k.form == formTiles && s.In != BF16 && !s.In.integer() {
				continue
			}
			b := s.blocking(&k, r.IntN(2) == 0)
			depth := ceil(b.depth, k.depth) * k.depth
			require.LessOrEqual(t, int64(4*depth*ceil(b.rows, k.mr)*k.mr), b.a, "%+v %+v", s, b)
			if !b.direct {
				require.LessOrEqual(t, int64(4*depth*ceil(b.cols, k.nr)*k.nr), b.b, "%+v %+v", s, b)
			}
			if b.sums > 0 {
				require.LessOrEqual(t, int64(4*b.rows*b.cols), b.sums, "%+v %+v", s, b)
			} else {
				require.True(t, s.Out.size() == 4 || b.depth == b.units, "%+v %+v", s, b)
			}
			require.LessOrEqual(t, b.tileRows, maxTileRows)
			require.Positive(t, b.tileRows)
			require.Zero(t, b.tileRows%k.mr+b.tileCols%k.nr, "%+v %+v", s, b)
			if b.depth < b.units { // the bits depend on where blocks of K begin
				require.Zero(t, b.depth%KC, "%+v %+v", s, b)
			}
			require.Positive(t, b.rows)
			require.Positive(t, b.cols)
		}
	}
}
