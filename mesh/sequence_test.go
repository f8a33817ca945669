package mesh

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

// byRows returns the program in slices over ranks, with its rows divided too.
func byRows(t testing.TB, p *graph.Program, ranks, slices int) *graph.Program {
	return tensorOf(t, p, ranks, Options{Slices: slices, Rows: true})
}

// eachDivided calls visit with programs of several numbers of rows, with dropout, documents and
// adapters. Four slices divide each number of rows. A slice is several sequences, part of one, or
// ends inside one.
func eachDivided(t testing.TB, visit func(name string, p *graph.Program, vocab int)) {
	for name, c := range models {
		for _, rows := range [][2]int{{1, 4}, {2, 4}, {2, 6}, {4, 3}} {
			c := c
			c.ResidDropout = 0.3
			adapters := []string{"*attn*", "*mlp*"}
			if c.EmbdDropout = 0; name == "gpt2" {
				c.EmbdDropout = 0.2
			}
			what := fmt.Sprintf("%s, %d rows of %d tokens", name, rows[0], rows[1])
			visit(what+" with dropout", differentiatedOf(t, c, rows[0], rows[1]), c.Vocab)
			c.ResidDropout, c.EmbdDropout, c.Documents = 0, 0, true
			visit(what+" of documents", differentiatedOf(t, c, rows[0], rows[1]), c.Vocab)
			visit(what+" of documents with adapters", differentiatedOf(t, c, rows[0], rows[1], adapters...), c.Vocab)
		}
	}
}

// A program with divided rows has the same loss and gradients as the original, up to float64
// rounding.
func TestDividedRowsHaveTheGradients(t *testing.T) {
	eachDivided(t, func(name string, p *graph.Program, vocab int) {
		wantLoss, want := ran[float64](t, p, vocab)
		for _, n := range [][2]int{{1, 4}, {2, 2}, {2, 4}, {4, 4}} {
			loss, got := ran[float64](t, byRows(t, p, n[0], n[1]), vocab)
			require.InEpsilon(t, wantLoss, loss, 1e-12, "%s, %d slices over %d ranks", name, n[1], n[0])
			for i := range want {
				what := fmt.Sprintf("%s, %d slices over %d ranks: %s", name, n[1], n[0], p.Params[i].Name)
				require.InDeltaSlice(t, want[i], got[i], 1e-12, what)
			}
		}
	})
}

// With divided rows, loss and gradients have the same bits on 1, 2 and 4 ranks.
func TestDividedRowsHaveTheSameBitsOnAnyRanks(t *testing.T) {
	eachDivided(t, func(name string, p *graph.Program, vocab int) {
		wantLoss, want := ran[float32](t, byRows(t, p, 1, 4), vocab)
		for _, ranks := range []int{2, 4} {
			loss, got := ran[float32](t, byRows(t, p, ranks, 4), vocab)
			require.Equal(t, wantLoss, loss, "%s over %d ranks", name, ranks)
			require.Equal(t, want, got, "%s over %d ranks", name, ranks)
		}
	})
}

// If the slices do not divide the number of rows, the rows are not divided.
func TestRowsThatSlicesDoNotDivide(t *testing.T) {
	for _, c := range models {
		for _, ranks := range []int{1, 2, 4} {
			p := differentiated(t, c)
			require.Equal(t, graph.Format(cut(t, p, ranks, 4)), graph.Format(byRows(t, p, ranks, 4)), "10 rows in 4 slices")
		}
	}
}

// Korthikanti et al. 2022, section 4.2.2: a layer has two all-gathers and two reduce-scatters, both
// forward and backward. Tensor parallelism alone has two all-reduces there, each of which sends as
// much as one all-gather and one reduce-scatter. The backward also gathers the inputs of the
// products whose outputs are divided.
func TestTrafficOfDividedRows(t *testing.T) {
	for name, c := range models {
		c.NormHeads = false // their gradients are all-reduced too
		for _, ranks := range []int{2, 4} {
			what := fmt.Sprintf("%s over %d ranks", name, ranks)
			p := byRows(t, differentiatedOf(t, c, 2, 4), ranks, 4)
			whole := int64(8 * c.Width)
			count := map[graph.Kind]map[graph.Pass]int{graph.AllGather: {}, graph.ReduceScatter: {}}
			for _, op := range p.Sections[0].Phases[0].Ops {
				switch {
				case op.Kind == graph.AllReduce:
					require.NotEqual(t, whole, p.Buf(op.Out[0].Buf).Elems(), "%s: %s", what, op.Name)
				case op.Kind == graph.AllGather && p.Buf(op.Out[0].Buf).Elems() == whole:
					count[op.Kind][op.Pass]++
				case op.Kind == graph.ReduceScatter:
					require.Equal(t, whole, p.Buf(op.In[0]).Elems(), "%s: %s", what, op.Name)
					count[op.Kind][op.Pass]++
				}
			}
			n, scattered, gathered := c.Layers, count[graph.ReduceScatter], count[graph.AllGather]
			require.Equal(t, 2*n+1, scattered[graph.Forward], "%s: a layer's two, and the embedding's", what)
			require.Equal(t, 2*n+1, scattered[graph.Backward], "%s: a layer's two, and the head's", what)
			require.Equal(t, 2*n+1, gathered[graph.Forward], "%s: a layer's two, and the head's", what)
			require.Equal(t, 4*n+1, gathered[graph.Backward], "%s: a layer's four, and the embedding's", what)
		}
	}
}
