package precision_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/zero"
)

// In a weight gradient only the saved activation may come from int8, never the gradient of the
// output, which is not saved.
func TestOnlyTheSavedFactorIsQuantised(t *testing.T) {
	c := config(1, 0, zero.Replicate, precision.BF16)
	c.Int8.Activations = true
	p := start(t, c).p
	require.NoError(t, precision.CheckSaved(p))
	read := map[graph.BufID]bool{}
	swapped := 0
	for i := range p.Sections {
		for j := range p.Sections[i].Phases {
			for k := range p.Sections[i].Phases[j].Ops {
				op := &p.Sections[i].Phases[j].Ops[k]
				if op.Kind == graph.Dequantize {
					read[op.Out[0].Buf] = true
				}
				if (op.Kind == graph.LinearGradW || op.Kind == graph.LinearGradWB) && read[op.In[0]] {
					require.False(t, read[op.In[1]], op.Name)
					op.In[0], op.In[1] = op.In[1], op.In[0]
					require.ErrorContains(t, precision.CheckSaved(p), op.Name, "which was saved in int8")
					op.In[0], op.In[1] = op.In[1], op.In[0]
					swapped++
				}
			}
		}
	}
	require.Positive(t, swapped)
}
