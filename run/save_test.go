package run

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/platform"
	"github.com/spillway-ml/spillway/zero"
)

// Every element of every state is saved by exactly one rank, in extents that fit a checkpoint.
// Ranks that hold the same state share it evenly. Each rank reads only the parts that it holds.
func TestSharesAndWants(t *testing.T) {
	for _, ranks := range []int{1, 2, 3, 8} {
		for stage := range 4 {
			for _, int8 := range []bool{false, true} {
				what := fmt.Sprintf("%d ranks, stage %d, 8 bits %v", ranks, stage, int8)
				p := sharded(t, ranks, zero.Stage(stage), int8)
				s := NewStates(p, platform.OneProcess(ranks), nil)
				shares, err := s.shares()
				require.NoError(t, err)
				most, all, err := PartBytes(p, ranks)
				require.NoError(t, err)
				var total, largest int64
				covered := map[[2]string]map[int64]int64{} // end by start, by state and tensor
				for _, share := range shares {
					var n int64
					for i, e := range share {
						n += e.Bytes()
						require.LessOrEqual(t, e.Bytes(), int64(checkpoint.ExtentBytes))
						require.True(t, i == 0 || share[i-1].DType.Size() >= e.DType.Size(), what)
						k := [2]string{e.State, e.Tensor}
						if covered[k] == nil {
							covered[k] = map[int64]int64{}
						}
						require.NotContains(t, covered[k], e.Start, what)
						covered[k][e.Start] = e.Start + e.N
					}
					total += n
					largest = max(largest, n)
				}
				require.Equal(t, largest, most, what)
				require.Equal(t, total, all, what)
				require.LessOrEqual(t, largest, 2*total/int64(ranks)+32<<10, "%s: ranks save about as much", what)
				held := map[string]checkpoint.Tensor{}
				for _, tensor := range s.Tensors() {
					held[tensor.Name] = tensor
					for _, state := range tensor.States {
						at, ends := int64(0), covered[[2]string{state, tensor.Name}]
						for range ends {
							at = ends[at]
						}
						require.Equal(t, tensor.Elements(state), at, "%s: %s of %s", what, state, tensor.Name)
					}
				}
				var wanted int64
				for r := range ranks {
					mine := NewStates(p, platform.OneProcess(ranks), map[int]Holder{r: memory{}})
					list, _, err := mine.wants(held)
					require.NoError(t, err)
					for _, w := range list {
						wanted += w.N
					}
				}
				var elements int64
				for i := range p.Params {
					for _, st := range s.Names(i) {
						copies := int64(ranks)
						if st.Axis >= 0 {
							copies = 1
						}
						tensor := held[p.Params[i].Name]
						elements += copies * tensor.Elements(Saved(st.Name))
					}
				}
				require.Equal(t, elements, wanted, what)
			}
		}
	}
}
