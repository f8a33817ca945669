//go:build linux

package vec

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// Quantising by column equals quantising the transposed matrix by row, at every SIMD level. A
// column with a number that is not finite gets codes of 0 and no scale, and does not affect other
// columns.
func TestInt8ByColumnIsByRowTurned(t *testing.T) {
	p := pool.New(2)
	defer p.Close()
	for _, shape := range [][2]int{{1, 1}, {3, 64}, {40, 65}, {17, 127}, {5, 128}, {130, 200}} {
		rows, cols := shape[0], shape[1]
		for _, as := range []Half{BF16, F16} {
			t.Run(fmt.Sprintf("%d×%d as %d", rows, cols, as), func(t *testing.T) {
				rng := rand.New(rand.NewPCG(uint64(rows), uint64(cols)))
				x := make([]float32, rows*cols)
				for i := range x {
					x[i] = float32(rng.NormFloat64() * math.Exp2(float64(rng.IntN(12)-6)))
				}
				for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
					if rng.IntN(2) == 0 {
						x[rng.IntN(len(x))] = float32(bad)
					}
				}
				for r := range rows { // zeros, one of them negative
					x[r*cols+cols-1] = float32(math.Copysign(0, float64(r%2*2-1)))
				}
				m := Int8Matrix{X: make([]uint16, len(x)), As: as, Rows: rows, Cols: cols, ByColumn: true}
				narrow(as, m.X, x)
				turned := Int8Matrix{X: make([]uint16, len(x)), As: as, Rows: cols, Cols: rows, Codes: make([]byte, len(x)), Scales: make([]float32, cols)}
				for r := range rows {
					for c := range cols {
						turned.X[c*rows+r] = m.X[r*cols+c]
					}
				}
				restore := useLevel(level.Portable)
				err := turned.Run(p)
				restore()
				require.NoError(t, err)
				for _, l := range levels() {
					m.Codes, m.Scales = make([]byte, len(x)), make([]float32, cols)
					restore := useLevel(l)
					err := m.Run(p)
					restore()
					require.NoError(t, err)
					for c, want := range turned.Scales {
						require.Equal(t, math.Float32bits(want), math.Float32bits(m.Scales[c]), "level %s, scale of column %d", l, c)
						for r := range rows {
							require.Equal(t, turned.Codes[c*rows+r], m.Codes[r*cols+c], "level %s, row %d, column %d", l, r, c)
						}
					}
				}
			})
		}
	}
}
