package graph

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// slicedProgram returns a program with one parameter in slices over the ranks of a mesh axis.
func slicedProgram(shape []int64, s Split, ranks int) *Program {
	p := &Program{Units: []Unit{{Name: "u"}}, Mesh: []Axis{{Name: "tensor", Size: ranks}}}
	if ranks == 1 {
		p.Mesh, s.Axis = nil, -1
	}
	for k := range s.Slices / ranks {
		of := s
		of.Slice = k
		p.Params = append(p.Params, Param{Name: fmt.Sprintf("w%d", k), Shape: shape, Split: &of})
	}
	return p
}

// Every element is in exactly one run. A slice has an equal part of each group, in order.
func TestRunsOfSlices(t *testing.T) {
	for _, c := range []struct {
		shape  []int64
		split  Split
		ranks  int
		local  []int64
		unused int64 // elements of the slices that belong to no parameter
	}{
		{[]int64{8, 3}, Split{Dim: 0, Slices: 4}, 2, []int64{2, 3}, 0},
		{[]int64{8, 3}, Split{Dim: 0, Slices: 4}, 1, []int64{2, 3}, 0},
		{[]int64{10, 3}, Split{Dim: 0, Slices: 4}, 4, []int64{3, 3}, 6},
		{[]int64{3, 8}, Split{Dim: 1, Slices: 4}, 2, []int64{3, 2}, 0},
		{[]int64{3, 12}, Split{Dim: 1, Slices: 2, Groups: 3}, 2, []int64{3, 6}, 0},
		{[]int64{12}, Split{Dim: 0, Slices: 2, Groups: 3}, 1, []int64{6}, 0},
		{[]int64{2, 4, 5}, Split{Dim: 1, Slices: 4}, 2, []int64{2, 1, 5}, 0},
	} {
		p := slicedProgram(c.shape, c.split, c.ranks)
		for i := range p.Params {
			require.NoError(t, p.checkSplit(&p.Params[i]))
			require.Equal(t, c.local, p.LocalShape(&p.Params[i]))
		}
		require.Len(t, p.Tensors(), 1)
		all := p.Params[0].Elems()
		list, total, perRank := p.Slices(0), int64(0), c.split.Slices/c.ranks
		require.Len(t, list, c.split.Slices)
		for k, s := range list {
			rank := k / perRank
			if c.ranks == 1 {
				rank = -1
			}
			require.Equal(t, Run{Rank: rank, Param: k % perRank, Len: s.Len}, s)
			total += s.Len
		}
		require.Equal(t, all, total, "a slice has the elements of a parameter alone")
		for _, cut := range []int64{all, 1, 5} { // reading in pieces finds the same places
			seen, next := map[[3]int64]int64{}, int64(0)
			for at := int64(0); at < all; at += cut {
				require.NoError(t, p.Runs(0, at, min(cut, all-at), func(r Run) error {
					require.Equal(t, next, r.At)
					next += r.Len
					for k := range r.Len {
						place := [3]int64{int64(r.Rank), int64(r.Param), r.From + k}
						require.NotContains(t, seen, place)
						require.Less(t, r.From+k, p.LocalElems(&p.Params[r.Param]))
						seen[place] = r.At + k
					}
					return nil
				}))
			}
			require.Equal(t, all, next)
			require.EqualValues(t, all, len(seen))
			require.Equal(t, int64(c.split.Slices)*p.LocalElems(&p.Params[0]), all+c.unused)
		}
	}
	// GPT-2's packed attention matrix: 2 inputs, 2 heads of width 2. A slice has one head's queries,
	// keys and values.
	p := slicedProgram([]int64{2, 12}, Split{Dim: 1, Slices: 2, Groups: 3}, 2)
	var of [2][]int64
	require.NoError(t, p.Runs(0, 0, 24, func(r Run) error {
		for k := range r.Len {
			require.EqualValues(t, len(of[r.Rank]), r.From+k)
			of[r.Rank] = append(of[r.Rank], r.At+k)
		}
		return nil
	}))
	require.Equal(t, []int64{0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21}, of[0])
}

func TestSlicesThatCannotBe(t *testing.T) {
	for _, c := range []struct {
		shape []int64
		split Split
		want  string
	}{
		{[]int64{8, 6}, Split{Dim: 1, Slices: 4}, "want equal parts"},
		{[]int64{5, 6}, Split{Dim: 0, Slices: 4}, "none that is empty"}, // of 2, 2, 1 and 0 rows
		{[]int64{8, 6}, Split{Dim: 0, Slices: 4, Groups: 3}, "want equal parts"},
		{[]int64{8, 6}, Split{Dim: 0, Slices: 3}, "is slice 0 of 3 on each of 2 ranks"},
		{[]int64{8, 6}, Split{Dim: 0, Slices: 4, Of: 1}, "want one that is split in the same way"},
	} {
		p := slicedProgram(c.shape, c.split, 2)
		require.ErrorContains(t, p.checkSplit(&p.Params[0]), c.want)
	}
}
