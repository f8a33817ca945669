package memplan

import (
	"cmp"
	"math/bits"
	"slices"
)

// overlaps records which buffers of a space overlap in time. Two buffers do if they have live
// ranges with a common step, in program order with all sections in sequence, or if one is in the
// other's beside list. In a deep model the number of overlapping pairs grows with the square of the
// layers, and nearly all pairs share steps. Therefore nothing is stored for such pairs.
type overlaps struct {
	// The ranges of buffer i are span[at[i]:at[i+1]], in program order. They are disjoint.
	span []steps
	at   []int32
	// By buffer: the lowest and highest step of its ranges, −1 if it has none.
	first, last []int64
	several     bool // some buffer has several ranges
	// By buffer, if several: the parts of the steps in which it has ranges, where the steps are
	// divided into 64 parts of equal size.
	parts  []uint64
	narrow int // the largest number of buffers in beside for a buffer that is not wide
	// By buffer: the buffers that share no step with it but overlap it in time because no event
	// orders the two. Ascending.
	beside [][]int32
	// Phases are handled separately: a buffer may have ranges in several phases, but seldom several
	// in one. Bit e of in[i] says that buffer i has ranges in phase e. within[i·phases+e] is then
	// their lowest and highest step, and bit e of split[i] says that there are several.
	phases    int
	within    []steps
	in, split []uint64

	whole *stabber // of all ranges, made on first use: see the method stabber
}

// steps is a range of steps, both ends included.
type steps struct{ from, to int64 }

// ofBuffer is a range of steps and the buffer to which it belongs.
type ofBuffer struct {
	steps
	buf int32
}

// mostPhases is the largest number of phases that are handled separately; all later ones count as
// one.
const mostPhases = 64

// newOverlaps returns the overlaps of n buffers from their ranges, in any order. cuts has the first
// step of every phase except the first.
func newOverlaps(n int, ranges []ofBuffer, beside [][]int32, cuts []int64) *overlaps {
	o := &overlaps{at: make([]int32, n+1), first: make([]int64, n), last: make([]int64, n), beside: beside,
		in: make([]uint64, n), split: make([]uint64, n), narrow: fewLive}
	slices.SortFunc(ranges, func(x, y ofBuffer) int {
		return cmp.Or(cmp.Compare(x.buf, y.buf), cmp.Compare(x.from, y.from), cmp.Compare(x.to, y.to))
	})
	cuts = cuts[:min(len(cuts), mostPhases-1)]
	o.phases = len(cuts) + 1
	o.within = make([]steps, n*o.phases)
	k := 0
	for i := range n {
		for ; k < len(ranges) && int(ranges[k].buf) == i; k++ {
			if end := len(o.span); end > int(o.at[i]) && ranges[k].from <= o.span[end-1].to {
				o.span[end-1].to = max(o.span[end-1].to, ranges[k].to)
				continue
			}
			o.span = append(o.span, ranges[k].steps)
		}
		o.at[i+1] = int32(len(o.span))
		o.several = o.several || o.at[i+1]-o.at[i] > 1
		o.first[i], o.last[i] = -1, -1
		if own := o.of(int32(i)); len(own) > 0 {
			o.first[i], o.last[i] = own[0].from, own[len(own)-1].to
			o.byPhase(i, own, cuts)
		}
		slices.Sort(beside[i])
		beside[i] = slices.Compact(beside[i])
	}
	o.divide()
	return o
}

// divide fills in parts.
func (o *overlaps) divide() {
	o.parts = make([]uint64, len(o.first))
	if !o.several {
		return
	}
	size := slices.Max(o.last)/64 + 1
	for i := range o.parts {
		for _, r := range o.of(int32(i)) {
			o.parts[i] |= ^uint64(0) >> (63 - r.to/size) & (^uint64(0) << (r.from / size))
		}
	}
}

// byPhase fills in within, in and split for buffer i; cuts are the first steps of phases.
func (o *overlaps) byPhase(i int, own []steps, cuts []int64) {
	e := 0
	for _, r := range own {
		for e < len(cuts) && cuts[e] <= r.from {
			e++
		}
		for part := r; part.from <= r.to; part.from = part.to + 1 {
			for e < len(cuts) && cuts[e] <= part.from {
				e++
			}
			if part.to = r.to; e < len(cuts) {
				part.to = min(part.to, cuts[e]-1)
			}
			at := &o.within[i*o.phases+e]
			if o.in[i]>>e&1 == 1 {
				o.split[i] |= 1 << e
				at.to = part.to
			} else {
				o.in[i] |= 1 << e
				*at = part
			}
		}
	}
}

// phase returns the lowest and highest step of buffer i in phase e, in which it has ranges.
func (o *overlaps) phase(i int32, e int) steps { return o.within[int(i)*o.phases+e] }

// life is the time in which a buffer may be live: its lowest and highest step, and overlaps.parts.
type life struct {
	steps
	parts uint64
}

func (o *overlaps) life(i int32) life { return life{steps{o.first[i], o.last[i]}, o.parts[i]} }

// of returns the ranges of buffer i.
func (o *overlaps) of(i int32) []steps { return o.span[o.at[i]:o.at[i+1]] }

// share says whether two buffers have ranges with a step in common.
func (o *overlaps) share(i, j int32) bool {
	for both := o.in[i] & o.in[j]; both != 0; both &= both - 1 {
		e := bits.TrailingZeros64(both)
		if a, b := o.phase(i, e), o.phase(j, e); a.from <= b.to && b.from <= a.to {
			if (o.split[i]|o.split[j])>>e&1 == 0 || o.shareSplit(i, j) {
				return true
			}
		}
	}
	return false
}

// shareSplit does the same as share for buffers that have several ranges in a phase.
func (o *overlaps) shareSplit(i, j int32) bool {
	a, b := o.of(i), o.of(j)
	if len(a) > len(b) {
		a, b = b, a
	}
	for _, s := range a {
		k, end := 0, len(b)
		for k < end { // slices.BinarySearchFunc would call a function for each range
			if mid := (k + end) / 2; b[mid].to < s.from {
				k = mid + 1
			} else {
				end = mid
			}
		}
		if b = b[k:]; len(b) == 0 {
			return false
		}
		if b[0].from <= s.to {
			return true
		}
	}
	return false
}

// between says whether two different buffers overlap in time.
func (o *overlaps) between(i, j int32) bool {
	if o.share(i, j) {
		return true
	}
	_, found := slices.BinarySearch(o.beside[i], j)
	return found
}

// stabber finds the ranges that have a step in common with a given range. The ranges are sorted
// by first step, with a tree of the highest last step above them (a priority search tree).
type stabber struct {
	span []ofBuffer
	most []int64 // by node: the highest last step of the leaves below; −1: all are dropped
	size int     // leaves, a power of two
}

// stabber returns a stabber of all ranges, from which the caller may drop ranges.
func (o *overlaps) stabber() *stabber {
	if o.whole == nil {
		o.whole = newStabber(o)
	}
	s := *o.whole
	s.most = slices.Clone(s.most)
	return &s
}

func newStabber(o *overlaps) *stabber {
	s := &stabber{span: make([]ofBuffer, 0, len(o.span)), size: 1}
	for i := range o.first {
		for _, r := range o.of(int32(i)) {
			s.span = append(s.span, ofBuffer{r, int32(i)})
		}
	}
	slices.SortFunc(s.span, func(x, y ofBuffer) int { return cmp.Or(cmp.Compare(x.from, y.from), cmp.Compare(x.buf, y.buf)) })
	for s.size < len(s.span) {
		s.size *= 2
	}
	s.most = make([]int64, 2*s.size)
	for k := range s.most {
		s.most[k] = -1
	}
	for k, r := range s.span {
		s.most[s.size+k] = r.to
	}
	for k := s.size - 1; k > 0; k-- {
		s.most[k] = max(s.most[2*k], s.most[2*k+1])
	}
	return s
}

// each calls visit with the index of every remaining range that shares a step with r. visit may
// drop that range.
func (s *stabber) each(r steps, visit func(k int)) {
	end, _ := slices.BinarySearchFunc(s.span, r.to+1, func(x ofBuffer, to int64) int { return cmp.Compare(x.from, to) })
	s.walk(1, 0, s.size, end, r.from, visit)
}

func (s *stabber) walk(node, lo, hi, end int, from int64, visit func(k int)) {
	if lo >= end || s.most[node] < from {
		return
	}
	if hi-lo == 1 {
		visit(lo)
		return
	}
	mid := (lo + hi) / 2
	s.walk(2*node, lo, mid, end, from, visit)
	s.walk(2*node+1, mid, hi, end, from, visit)
}

// drop removes range k.
func (s *stabber) drop(k int) {
	node := s.size + k
	s.most[node] = -1
	for node /= 2; node > 0; node /= 2 {
		s.most[node] = max(s.most[2*node], s.most[2*node+1])
	}
}

// wide says whether so many buffers overlap buffer i without a common step that runMany searches
// all buffers for its place. In a pipeline a micro-batch's tokens may be copied at any time before
// their use, so their buffer overlaps all buffers of earlier micro-batches.
func (o *overlaps) wide(i int32) bool { return len(o.beside[i]) > o.narrow }

// lastOverlap returns for each buffer the last position in rank of a buffer that overlaps it in
// time and is not wide, −1 for none. It also returns the last position of a wide buffer. After both
// positions no search needs the buffer's place.
func (o *overlaps) lastOverlap(rank []int32) (last []int32, wide int) {
	last, wide = make([]int32, len(rank)), -1
	for i := range last {
		last[i] = -1
	}
	s := o.stabber()
	for k, i := range slices.Backward(rank) {
		if o.wide(i) {
			wide = max(wide, k)
			continue
		}
		for _, r := range o.of(i) {
			s.each(r, func(at int) {
				if j := s.span[at].buf; j != i {
					last[j] = max(last[j], int32(k))
					s.drop(at)
				}
			})
		}
		for _, j := range o.beside[i] {
			last[j] = max(last[j], int32(k))
		}
	}
	return last, wide
}

// partners calls visit with every buffer that overlaps buffer i in time, with some of them more
// than once.
func (o *overlaps) partners(s *stabber, i int32, visit func(j int32)) {
	for _, r := range o.of(i) {
		s.each(r, func(at int) {
			if j := s.span[at].buf; j != i {
				visit(j)
			}
		})
	}
	for _, j := range o.beside[i] {
		visit(j)
	}
}

// rows returns for each buffer the set of buffers that overlap it in time. When a range starts,
// the set of all buffers whose ranges are running is or-ed into its row at once.
func (o *overlaps) rows() bitRows {
	n := len(o.first)
	m := newBitRows(n, n)
	running := make([]uint64, m.words)
	spans := o.stabber().span
	byEnd := slices.Clone(spans)
	slices.SortFunc(byEnd, func(x, y ofBuffer) int { return cmp.Compare(x.to, y.to) })
	for _, s := range spans {
		for ; byEnd[0].to < s.from; byEnd = byEnd[1:] {
			j := byEnd[0].buf
			running[j>>6] &^= 1 << (j & 63)
		}
		row := m.row(s.buf)
		for w, some := range running {
			row[w] |= some
		}
		running[s.buf>>6] |= 1 << (s.buf & 63)
	}
	for i, list := range o.beside {
		for _, j := range list {
			m.row(int32(i))[j>>6] |= 1 << (j & 63)
		}
	}
	m.mirror()
	return m
}
