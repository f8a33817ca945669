package memplan

import (
	"cmp"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// sweep adds this section's ranges to those of every space; base is added to their steps, so
// that sections follow each other. To beside it adds pairs of buffers that no event orders: one
// has a range that has ended in program order but may still be in use when the other's range
// starts, since a later step does not yet know that it is over. Such ended ranges are few and
// are checked one by one. index numbers the buffers of a space.
func (s *section) sweep(base int64, ranges *[graph.NumSpaces][]ofBuffer, beside *[graph.NumSpaces][][]int32, index []int32) {
	sure := s.sureFrom()
	byStart, byEnd := make([]int32, len(s.ranges)), make([]int32, len(s.ranges))
	end := make([]int32, len(s.ranges))
	for i := range byStart {
		byStart[i], byEnd[i] = int32(i), int32(i)
		end[i] = int32(s.lastStep(int32(i)))
	}
	slices.SortStableFunc(byStart, func(x, y int32) int { return cmp.Compare(s.ranges[x].Steps[0], s.ranges[y].Steps[0]) })
	slices.SortStableFunc(byEnd, func(x, y int32) int { return cmp.Compare(end[x], end[y]) })
	var ended [graph.NumSpaces][]int32 // ranges that some later step may still find in use
	p := s.trace.Program()
	place := func(r int32) (sp graph.Space, buf int32) {
		id := s.ranges[r].Buf
		return p.Buf(id).Space, index[id]
	}
	for _, y := range byStart {
		start := s.ranges[y].Steps[0]
		for ; end[byEnd[0]] < start; byEnd = byEnd[1:] {
			sp, _ := place(byEnd[0])
			ended[sp] = append(ended[sp], byEnd[0])
		}
		sp, k := place(y)
		ranges[sp] = append(ranges[sp], ofBuffer{steps{base + int64(start), base + int64(end[y])}, k})
		keep := ended[sp][:0]
		for _, x := range ended[sp] {
			if s.isOver(x, &sure[start]) {
				continue
			}
			keep = append(keep, x)
			if _, j := place(x); j != k && !s.before(x, y) {
				beside[sp][k], beside[sp][j] = append(beside[sp][k], j), append(beside[sp][j], k)
			}
		}
		ended[sp] = keep
	}
}

// sureFrom returns, by step i and stream, the last step that every buffer-using step from i on
// knows to have finished. A stream's later steps know at least as much as its earlier ones, so
// the next step of each stream decides.
func (s *section) sureFrom() [][graph.NumStreams]int32 {
	n := len(s.trace.Steps)
	sure := make([][graph.NumStreams]int32, n+1)
	var next [graph.NumStreams]int
	for st := range next {
		next[st] = -1
		sure[n][st] = int32(n)
	}
	for i := n - 1; i >= 0; i-- {
		if usesAny(s.trace.Op(i)) {
			next[s.trace.Op(i).Stream] = i
		}
		for u := range sure[i] {
			sure[i][u] = int32(n)
			for _, j := range next {
				if j >= 0 {
					sure[i][u] = min(sure[i][u], int32(s.trace.Known(j, graph.StreamID(u))))
				}
			}
		}
	}
	return sure
}

// isOver says whether all uses of range r are among the steps known to have finished.
func (s *section) isOver(r int32, sure *[graph.NumStreams]int32) bool {
	for st, j := range s.last[r] {
		if j > sure[st] {
			return false
		}
	}
	return true
}
