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
	// By range: ends[at[i]:at[i+1]] has its first and last step on each stream. In every order these
	// include its first and its last position, since a stream runs its steps in program order.
	ends, at []int32
	orders   []order
}

// order is a sequence in which the streams may run the steps one at a time.
type order struct {
	step  []int   // by position
	pos   []int32 // by step
	lives []lived // see section.lives
}

func newSection(p *graph.Program, t *graph.Trace) section {
	s := section{trace: t, ranges: t.LiveRanges()}
	s.last = make([][graph.NumStreams]int32, len(s.ranges))
	s.known = make([][graph.NumStreams]int32, len(s.ranges))
	s.ends, s.at = make([]int32, 0, 3*len(s.ranges)), make([]int32, 1, len(s.ranges)+1)
	for i, r := range s.ranges {
		last, known := &s.last[i], &s.known[i]
		for st := range last {
			last[st], known[st] = -1, int32(len(t.Steps))
		}
		for _, step := range r.Steps {
			st := t.Op(int(step)).Stream
			if last[st] < 0 { // this is the stream's first use; later ones know at least as much
				s.ends = append(s.ends, step)
				for u := range known {
					known[u] = min(known[u], int32(t.Known(int(step), graph.StreamID(u))))
				}
			}
			last[st] = step
		}
		for _, first := range s.ends[s.at[i]:] {
			if step := last[t.Op(int(first)).Stream]; step > first {
				s.ends = append(s.ends, step)
			}
		}
		s.at = append(s.at, int32(len(s.ends)))
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

// orders returns program order. If there are several streams it adds orders that run one of them as
// early or as late as the events allow, since a stream that runs ahead holds more memory.
func orders(t *graph.Trace) []order {
	n := len(t.Steps)
	program := order{step: make([]int, n), pos: make([]int32, n)}
	var queue [graph.NumStreams][]int32
	var streams []graph.StreamID
	for i := range n {
		program.step[i], program.pos[i] = i, int32(i)
		st := t.Op(i).Stream
		if len(queue[st]) == 0 {
			streams = append(streams, st)
		}
		queue[st] = append(queue[st], int32(i))
	}
	list := []order{program}
	if len(streams) == 1 {
		return list
	}
	for _, first := range streams {
		list = append(list, biased(t, &queue, streams, first, -1), biased(t, &queue, streams, first, 1))
	}
	return list
}

// biased returns an order that runs stream one as early (rank −1) or as late (1) as the events
// allow; other streams have rank 0. Of the next steps that can start, it chooses the one with the
// lowest rank; if ranks are equal, the first in program order. queue has the steps by stream,
// streams the streams that have steps.
func biased(t *graph.Trace, queue *[graph.NumStreams][]int32, streams []graph.StreamID, one graph.StreamID,
	rank int) order {
	n := len(t.Steps)
	o := order{step: make([]int, 0, n), pos: make([]int32, n)}
	var head [graph.NumStreams]int
	// By stream: its last step so far, and a stream for which its next step waits; −1: none.
	var done, waits [graph.NumStreams]int32
	// wait sets waits for a stream. The caller knows that streams below u have advanced far enough.
	wait := func(st, u graph.StreamID) {
		waits[st] = -1
		if head[st] == len(queue[st]) {
			return
		}
		for i := int(queue[st][head[st]]); u < graph.NumStreams; u++ {
			if int32(t.Known(i, u)) > done[u] {
				waits[st] = int32(u)
				return
			}
		}
	}
	for st := range done {
		done[st] = -1
	}
	for st := range graph.NumStreams {
		wait(st, 0)
	}
	for len(o.step) < n {
		at, best, bestRank := graph.StreamID(0), -1, 0
		for _, st := range streams {
			if head[st] == len(queue[st]) || waits[st] >= 0 {
				continue
			}
			i, r := int(queue[st][head[st]]), 0
			if st == one {
				r = rank
			}
			if best < 0 || r < bestRank || r == bestRank && i < best {
				at, best, bestRank = st, i, r
			}
		}
		o.pos[best] = int32(len(o.step))
		o.step = append(o.step, best)
		done[at] = int32(best)
		head[at]++
		wait(at, 0)
		for _, st := range streams {
			if waits[st] == int32(at) {
				wait(st, at)
			}
		}
	}
	return o
}

// lived is a buffer's life in an order: the positions of its first and last use.
type lived struct {
	buf      graph.BufID
	from, to int32
}

// lives returns all lives in order o, by buffer.
func (s *section) lives(o int) []lived {
	if s.orders[o].lives == nil {
		s.orders[o].lives = s.appendLives(nil, o)
	}
	return s.orders[o].lives
}

// appendLives appends the live ranges in order o to a list. Ranges of one buffer that overlap in
// that order are joined.
func (s *section) appendLives(list []lived, o int) []lived {
	pos := s.orders[o].pos
	for i := 0; i < len(s.ranges); {
		id, first := s.ranges[i].Buf, len(list)
		for ; i < len(s.ranges) && s.ranges[i].Buf == id; i++ {
			l := lived{id, int32(len(pos)), -1}
			for _, step := range s.ends[s.at[i]:s.at[i+1]] {
				l.from, l.to = min(l.from, pos[step]), max(l.to, pos[step])
			}
			if s.ranges[i].Kept {
				l.to = int32(len(pos)) - 1
			}
			list = append(list, l)
		}
		if len(list) == first+1 {
			continue
		}
		slices.SortFunc(list[first:], func(a, b lived) int { return int(a.from - b.from) })
		last := first
		for _, l := range list[first+1:] {
			if l.from <= list[last].to {
				list[last].to = max(list[last].to, l.to)
				continue
			}
			last++
			list[last] = l
		}
		list = list[:last+1]
	}
	return list
}

// turn returns the step from which a buffer's first use counts as late. It is shortly before the
// backward, because the loss also makes gradients.
func (s *section) turn() int {
	n := len(s.trace.Steps)
	for i := range n {
		if s.trace.Op(i).Pass != graph.Forward {
			return i - n/50
		}
	}
	return n
}
