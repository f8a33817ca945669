package vec

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// The second element of a loss counts the rows whose target is the first of the largest logits.
func TestCrossEntropyCountsRightClasses(t *testing.T) {
	p := pool.New(2)
	defer p.Close()
	nan := float32(math.NaN())
	logits := []float32{
		1, 3, 2, // right
		3, 3, 2, // the second of two equal ones: wrong
		3, 3, 2, // the first of two equal ones: right
		9, 0, 0, // no target
		0, 1, 2, // wrong
		nan, 1, 0, // NaN: no class is right
	}
	loss := []float64{0, 5}
	k := &CrossEntropy[float32]{N: 6, V: 3, Logits: logits, Targets: []int32{1, 1, 0, -1, 0, 1}, LSE: make([]float32, 6), Loss: loss}
	require.NoError(t, k.Run(p))
	require.EqualValues(t, 5+2, loss[1])
	k.DLogits, k.RowLoss = make([]float32, 18), make([]float64, 6)
	require.ErrorContains(t, k.Run(p), "Loss", "logits may be overwritten")
}
