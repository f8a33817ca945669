package memplan

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

// TestKnownRuns: operations that use no buffer do not change the placement, so the known result is
// reused. A buffer with another size or a longer life is a new problem.
func TestKnownRuns(t *testing.T) {
	draw := rand.New(rand.NewPCG(1, 2))
	p := Transformer(9, 64, 32, 100, 4, 1, 2, true)
	idle := p.Clone()
	for i := range idle.Sections {
		for k := range idle.Sections[i].Phases {
			ph := &idle.Sections[i].Phases[k]
			for n := range 40 {
				op := graph.Op{Kind: graph.Join, Name: fmt.Sprintf("idle%d", n), Work: graph.NoBuf, Skip: graph.NoBuf, Unit: -1}
				ph.Ops = slices.Insert(ph.Ops, draw.IntN(len(ph.Ops)), op)
			}
		}
	}
	larger := p.Clone()
	larger.Buffers[slices.IndexFunc(larger.Buffers, func(b graph.Buffer) bool { return b.Name == "first/h.3.pre" })].Shape[0] += 512
	first, again, other, alone := placers(t, p, 1), placers(t, idle, 1), placers(t, larger, 1), placers(t, idle, 1)
	var known Known
	for k, pl := range first {
		rank := make([]int32, len(pl.size))
		for i := range rank {
			rank[i] = int32(i)
		}
		for _, each := range []*placer{pl, again[k], other[k], alone[k]} {
			each.prepare()
		}
		for _, by := range pl.rankings() {
			by.sort(rank)
			off, _ := known.run(pl, rank, by.fit)
			runs := len(known.runs)
			got, _ := known.run(again[k], rank, by.fit)
			require.Same(t, &off[0], &got[0])
			require.Len(t, known.runs, runs)
			want, _ := alone[k].runMany(rank, by.fit)
			require.Equal(t, want, got)
			require.Equal(t, alone[k].work, again[k].work)
			known.run(other[k], rank, by.fit)
			require.Len(t, known.runs, runs+1)
		}
	}
}
