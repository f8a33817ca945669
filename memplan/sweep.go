package memplan

import (
	"cmp"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// sweep puts into the clash rows of every space which of its buffers overlap in
// time in this section: of each pair into the row of the one whose range starts
// later (bitRows.mirror completes them). index numbers the buffers of a space.
//
// It goes through the ranges by their first steps. A range that runs, its last
// step still to come, overlaps with whatever starts: those are a set of bits that
// is or-ed into a row at once, or the pairs of a deep model, a square of its
// layers, would be visited one by one. Ranges that have ended, but that some step
// still to come does not know to be over, are few, and looked at singly.
func (s *section) sweep(spaces *[graph.NumSpaces]timeline, index []int32) {
	sure := s.sureFrom()
	byStart, byEnd := make([]int32, len(s.ranges)), make([]int32, len(s.ranges))
	end := make([]int32, len(s.ranges))
	for i := range byStart {
		byStart[i], byEnd[i] = int32(i), int32(i)
		end[i] = int32(s.lastStep(int32(i)))
	}
	slices.SortStableFunc(byStart, func(x, y int32) int { return cmp.Compare(s.ranges[x].Steps[0], s.ranges[y].Steps[0]) })
	slices.SortStableFunc(byEnd, func(x, y int32) int { return cmp.Compare(end[x], end[y]) })
	type state struct {
		running []uint64 // bits of buffers with a range that runs
		count   []int32  // such ranges by buffer
		ended   []int32  // ranges that not all steps to come know to be over
	}
	var open [graph.NumSpaces]state
	for sp := range open {
		open[sp] = state{running: make([]uint64, spaces[sp].clash.words), count: make([]int32, len(spaces[sp].ids))}
	}
	p := s.trace.Program()
	place := func(r int32) (*state, *timeline, int32) {
		id := s.ranges[r].Buf
		sp := p.Buf(id).Space
		return &open[sp], &spaces[sp], index[id]
	}
	for _, y := range byStart {
		start := s.ranges[y].Steps[0]
		for ; end[byEnd[0]] < start; byEnd = byEnd[1:] {
			o, _, k := place(byEnd[0])
			if o.count[k]--; o.count[k] == 0 {
				o.running[k>>6] &^= 1 << (k & 63)
			}
			o.ended = append(o.ended, byEnd[0])
		}
		o, tl, k := place(y)
		row := tl.clash.row(k)
		for w, bits := range o.running {
			row[w] |= bits
		}
		keep := o.ended[:0]
		for _, x := range o.ended {
			if s.isOver(x, &sure[start]) {
				continue
			}
			keep = append(keep, x)
			if !s.before(x, y) {
				j := index[s.ranges[x].Buf]
				row[j>>6] |= 1 << (j & 63)
			}
		}
		o.ended = keep
		row[k>>6] &^= 1 << (k & 63)
		if o.count[k]++; o.count[k] == 1 {
			o.running[k>>6] |= 1 << (k & 63)
		}
	}
}

// sureFrom returns by step i and by stream the last step that every step from i
// on, of those that use a buffer, knows to have finished. A stream's steps know
// more and more, so its next one decides.
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

// isOver tells whether all uses of range r are among the steps known to have
// finished.
func (s *section) isOver(r int32, sure *[graph.NumStreams]int32) bool {
	for st, j := range s.last[r] {
		if j > sure[st] {
			return false
		}
	}
	return true
}
