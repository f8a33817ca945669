package memplan

import (
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// section has one section's live ranges, and several orders in which its steps may run.
type section struct {
	trace  *graph.Trace
	ranges []graph.LiveRange
	// By range and stream: last is the range's last use on the stream (−1: none); known is
	// the latest step of the stream that has finished before any use of the range starts.
	last, known [][graph.NumStreams]int32
	orders      []order
}

// order is a sequence in which the streams may run the steps one at a time.
type order struct {
	step []int   // by position
	pos  []int32 // by step
}

func newSection(p *graph.Program, t *graph.Trace) section {
	s := section{trace: t, ranges: t.LiveRanges()}
	s.last = make([][graph.NumStreams]int32, len(s.ranges))
	s.known = make([][graph.NumStreams]int32, len(s.ranges))
	for i, r := range s.ranges {
		last, known := &s.last[i], &s.known[i]
		for st := range last {
			last[st], known[st] = -1, int32(len(t.Steps))
		}
		for _, step := range r.Steps {
			st := t.Op(int(step)).Stream
			if last[st] < 0 { // this is the stream's first use; later ones know at least as much
				for u := range known {
					known[u] = min(known[u], int32(t.Known(int(step), graph.StreamID(u))))
				}
			}
			last[st] = step
		}
		if r.Kept { // the range lasts to the end of the section
			last[graph.Compute] = int32(len(t.Steps))
		}
	}
	s.orders = orders(t)
	return s
}

// lastStep returns the last step in program order at which range r is live.
func (s *section) lastStep(r int32) int {
	if s.ranges[r].Kept {
		return len(s.trace.Steps) - 1
	}
	return int(s.ranges[r].Steps[len(s.ranges[r].Steps)-1])
}

// orders returns program order and, if there are several streams, orders that run one of them
// as early or as late as the events allow, since a stream that runs ahead holds more memory.
func orders(t *graph.Trace) []order {
	n := len(t.Steps)
	var queue [graph.NumStreams][]int32
	var streams []graph.StreamID
	for i := range n {
		st := t.Op(i).Stream
		if len(queue[st]) == 0 {
			streams = append(streams, st)
		}
		queue[st] = append(queue[st], int32(i))
	}
	// run returns the order that always takes next, of the streams' next steps that can start,
	// the one of the lowest rank; ties go to the first in program order.
	run := func(rank func(graph.StreamID) int) order {
		o := order{step: make([]int, 0, n), pos: make([]int32, n)}
		var head [graph.NumStreams]int
		var done [graph.NumStreams]int32
		for st := range done {
			done[st] = -1
		}
		for len(o.step) < n {
			best, bestRank := -1, 0
			for _, st := range streams {
				if head[st] == len(queue[st]) {
					continue
				}
				i := int(queue[st][head[st]])
				free := true
				for u := range done {
					free = free && int32(t.Known(i, graph.StreamID(u))) <= done[u]
				}
				if r := rank(st); free && (best < 0 || r < bestRank || r == bestRank && i < best) {
					best, bestRank = i, r
				}
			}
			st := t.Op(best).Stream
			o.pos[best] = int32(len(o.step))
			o.step = append(o.step, best)
			done[st] = int32(best)
			head[st]++
		}
		return o
	}
	list := []order{run(func(graph.StreamID) int { return 0 })}
	if len(streams) == 1 {
		return list
	}
	for _, first := range streams {
		for _, r := range []int{-1, 1} {
			list = append(list, run(func(st graph.StreamID) int {
				if st == first {
					return r
				}
				return 0
			}))
		}
	}
	return list
}

// eachLife calls visit for each live range with the positions of its first and last use in the
// given order. Ranges of one buffer that overlap in that order are joined.
func (s *section) eachLife(o int, visit func(id graph.BufID, from, to int32)) {
	pos := s.orders[o].pos
	var lives [][2]int32
	for i := 0; i < len(s.ranges); {
		id := s.ranges[i].Buf
		lives = lives[:0]
		for ; i < len(s.ranges) && s.ranges[i].Buf == id; i++ {
			from, to := int32(len(pos)), int32(-1)
			for _, step := range s.ranges[i].Steps {
				from, to = min(from, pos[step]), max(to, pos[step])
			}
			if s.ranges[i].Kept {
				to = int32(len(pos)) - 1
			}
			lives = append(lives, [2]int32{from, to})
		}
		slices.SortFunc(lives, func(a, b [2]int32) int { return int(a[0] - b[0]) })
		cur := lives[0]
		for _, l := range lives[1:] {
			if l[0] <= cur[1] {
				cur[1] = max(cur[1], l[1])
				continue
			}
			visit(id, cur[0], cur[1])
			cur = l
		}
		visit(id, cur[0], cur[1])
	}
}

// bound is the largest sum of live bytes of a space, and the position in an order of a section
// at which it occurs. section is −1 if nothing runs.
type bound struct {
	bytes               int64
	section, order, pos int
	beside              []graph.BufID // buffers of concurrent steps that findCliques added
}

// findBounds sums live bytes by space and class at every step of a section, in each of its orders.
func (a *analysis) findBounds() {
	var resident sums
	add := func(s *sums, id graph.BufID, sign int64) {
		b := a.p.Buf(id)
		s[b.Space][b.Class] += sign * (b.Bytes() - b.Pad)
		s[b.Space][graph.Padding] += sign * b.Pad
	}
	for _, ids := range a.resident {
		for _, id := range ids {
			add(&resident, id, 1)
		}
	}
	a.classPeak = resident
	for sp := range a.bound { // the bound of a program that runs nothing
		a.bound[sp] = bound{bytes: a.residentBytes[sp], section: -1}
	}
	var lives []life
	var begin []int32 // by step: index in lives of the last that starts there; −1: none
	var end []int32   // by step: index in lives of the last that ends there
	for si := range a.sections {
		sec := &a.sections[si]
		n := len(sec.trace.Steps)
		for len(begin) < n {
			begin, end = append(begin, -1), append(end, -1)
		}
		for oi := range sec.orders {
			for i := range n {
				begin[i], end[i] = -1, -1
			}
			lives = lives[:0]
			sec.eachLife(oi, func(id graph.BufID, from, to int32) {
				lives = append(lives, life{id, begin[from], end[to]})
				begin[from], end[to] = int32(len(lives)-1), int32(len(lives)-1)
			})
			now := resident
			for pos := range n {
				for k := begin[pos]; k >= 0; k = lives[k].began {
					add(&now, lives[k].buf, 1)
				}
				if pos == 0 || begin[pos] >= 0 { // otherwise the sum has not grown
					a.raise(&now, si, oi, pos)
				}
				for k := end[pos]; k >= 0; k = lives[k].ended {
					add(&now, lives[k].buf, -1)
				}
			}
		}
	}
}

// life is a buffer's life between two steps, an element of the lists by first and last step.
type life struct {
	buf          graph.BufID
	began, ended int32 // the next in each list; −1: none
}

// sums are live bytes by space and class.
type sums [graph.NumSpaces][graph.NumClasses]int64

// raise raises the peaks to the live bytes at a position, if these are higher.
func (a *analysis) raise(now *sums, section, order, pos int) {
	for sp := range now {
		total := int64(0)
		for c, bytes := range now[sp] {
			total += bytes
			a.classPeak[sp][c] = max(a.classPeak[sp][c], bytes)
		}
		if total > a.bound[sp].bytes || a.bound[sp].section < 0 {
			a.bound[sp] = bound{bytes: total, section: section, order: order, pos: pos}
		}
	}
}
