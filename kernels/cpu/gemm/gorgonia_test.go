package gemm

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"gorgonia.org/tensor"

	"github.com/spillway-ml/spillway/kernels/cpu/level"
)

// gorgonia's product is an independent reference with another order of summation. Results agree up
// to the rounding of K terms of size about 1.
func TestProductAgreesWithGorgonia(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 0))
	for range 25 {
		s := randomSpec(r, 7)
		s.LdA, s.LdB, s.LdC = 0, 0, 0
		s.Accumulate = false
		o := randomOperands(r, s)
		o.bias = nil
		m := s.stored()
		operand := func(i int, v []float32, transposed bool) *tensor.Dense {
			d := tensor.New(tensor.WithShape(m[i].rows, m[i].cols), tensor.WithBacking(append([]float32(nil), v...)))
			if transposed {
				require.NoError(t, d.T())
				require.NoError(t, d.Transpose())
			}
			return d
		}
		want, err := tensor.MatMul(operand(0, o.a, s.TransA), operand(1, o.b, s.TransB))
		require.NoError(t, err)
		require.InDeltaSlice(t, want.Data().([]float32), run(t, s, level.Best(), onePool, o), 1e-5*float64(s.K)+1e-5)
	}
}
