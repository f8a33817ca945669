package memplan

import (
	"cmp"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// sweep adds this section's ranges to those of every space. It adds base to their steps, so that
// sections follow each other. It adds pairs of buffers that no event orders to beside: one has a
// range that has ended in program order but may still be in use when the other's range starts.
// index numbers the buffers of a space.
func (s *section) sweep(base int64, ranges *[graph.NumSpaces][]ofBuffer, beside *[graph.NumSpaces][][]int32, index []int32) {
	byStart, byEnd := make([]int32, len(s.ranges)), make([]int32, len(s.ranges))
	end := make([]int32, len(s.ranges))
	for i := range byStart {
		byStart[i], byEnd[i] = int32(i), int32(i)
		end[i] = int32(s.lastStep(int32(i)))
	}
	slices.SortStableFunc(byStart, func(x, y int32) int { return cmp.Compare(s.ranges[x].Steps[0], s.ranges[y].Steps[0]) })
	slices.SortStableFunc(byEnd, func(x, y int32) int { return cmp.Compare(end[x], end[y]) })
	var ended [graph.NumSpaces]endedRanges
	p := s.trace.Program()
	for _, y := range byStart {
		start := s.ranges[y].Steps[0]
		for ; end[byEnd[0]] < start; byEnd = byEnd[1:] {
			id := s.ranges[byEnd[0]].Buf
			ended[p.Buf(id).Space].add(index[id], &s.last[byEnd[0]])
		}
		id := s.ranges[y].Buf
		sp, k := p.Buf(id).Space, index[id]
		ranges[sp] = append(ranges[sp], ofBuffer{steps{base + int64(start), base + int64(end[y])}, k})
		ended[sp].inUse(&s.known[y], func(j int32) {
			if j != k {
				beside[sp][k], beside[sp][j] = append(beside[sp][k], j), append(beside[sp][j], k)
			}
		})
	}
}

// endedRanges has, by stream, the last uses of ranges on it, latest last. Ranges are added in
// nearly that order.
type endedRanges [graph.NumStreams][]lastUse

// lastUse is the step of a range's last use on a stream, and the range's buffer.
type lastUse struct{ step, buf int32 }

// add adds a range of a buffer with its last use by stream, −1 for none.
func (e *endedRanges) add(buf int32, last *[graph.NumStreams]int32) {
	for st, step := range last {
		if step < 0 {
			continue
		}
		list := append(e[st], lastUse{step, buf})
		for i := len(list) - 1; i > 0 && list[i-1].step > step; i-- {
			list[i-1], list[i] = list[i], list[i-1]
		}
		e[st] = list
	}
}

// inUse calls visit with the buffer of every range that has a use after the steps known to have
// finished, by stream; with some buffers more than once.
func (e *endedRanges) inUse(known *[graph.NumStreams]int32, visit func(buf int32)) {
	for st, list := range e {
		for i := len(list) - 1; i >= 0 && list[i].step > known[st]; i-- {
			visit(list[i].buf)
		}
	}
}
