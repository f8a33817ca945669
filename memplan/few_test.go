package memplan

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/spillway-ml/spillway/graph"
)

// placers returns a placer for each memory space in which the program has buffers to place.
func placers(t require.TestingT, p *graph.Program, align int64) (list []*placer) {
	a, err := Analyse(p)
	require.NoError(t, err)
	a.overlap(align)
	for sp := range graph.NumSpaces {
		if pl := a.placer(sp, a.bound[sp].bytes-a.residentBytes[sp], nil); pl != nil {
			list = append(list, pl)
		}
	}
	return list
}

// requireFewIsMany requires that runFew and runMany give the same places and count the same work,
// for every ranking and for shuffled orders.
func requireFewIsMany(t require.TestingT, p *graph.Program, align int64, shuffle func(rank []int32)) {
	few, many := placers(t, p, align), placers(t, p, align)
	for k, pl := range few {
		other := many[k]
		pl.prepare()
		other.prepare()
		try := func(rank []int32, how fit, last *trail) {
			for _, narrow := range []int{fewLive, 0} { // 0: all that have buffers beside them are wide
				other.tl.narrow = narrow
				off, extent := pl.runFew(rank, how, last)
				want, wantExtent := other.runMany(rank, how)
				require.Equal(t, want, off)
				require.Equal(t, wantExtent, extent)
				require.Equal(t, other.work, pl.work)
			}
		}
		rank := make([]int32, len(pl.size))
		for i := range rank {
			rank[i] = int32(i)
		}
		for _, by := range pl.rankings() {
			by.sort(rank)
			var last trail
			try(rank, by.fit, &last) // the second run repeats all of it
			shuffled := slices.Clone(rank)
			shuffle(shuffled[len(rank)/2:])
			last.same = len(rank) / 2
			try(shuffled, by.fit, &last)
			shuffle(shuffled)
			try(shuffled, by.fit, &trail{})
		}
	}
}

func TestFewIsMany(t *testing.T) {
	backward := func(rank []int32) { slices.Reverse(rank) }
	requireFewIsMany(t, Transformer(9, 64, 32, 100, 4, 1, 2, true), DefaultAlign, backward)
	requireFewIsMany(t, Transformer(40, 64, 32, 100, 3, 2, 1, false), 1, backward)
	rapid.Check(t, func(t *rapid.T) {
		requireFewIsMany(t, DrawProgram(t), int64(1)<<rapid.IntRange(0, 9).Draw(t, "align"), func(rank []int32) {
			copy(rank, rapid.Permutation(rank).Draw(t, "order"))
		})
	})
}
