package graph

// Order says that the operation at index After of a phase must not start before the one at
// the smaller index Before has finished, in addition to the order that the data requires.
// The throttles of prefetching become such orders.
type Order struct{ Before, After int }

// Synchronize gives the operations of one phase the events that they need. It orders two operations
// on different streams if they touch overlapping bytes and one of them writes. It also orders the
// two operations of each Order. An order that follows from others gets no event. Existing waits and
// records stay.
//
//	compute:  a ──────── c(reads y)        compute:  a ─────●wait 1── c
//	comm:        b(writes y)          →    comm:        b record 1
//
// It assumes that everything before the phase has finished.
func Synchronize(p *Program, ops []Op, orders []Order) {
	s := synchronizer{p: p, ops: ops, accesses: make([][]access, len(p.Buffers)), clock: make([]vclock, len(ops))}
	after := make([][]int, len(ops))
	for _, o := range orders {
		after[o.After] = append(after[o.After], o.Before)
	}
	for i := range ops {
		s.add(i, after[i])
	}
}

type access struct {
	op     int
	lo, hi int64
	write  bool
}

type synchronizer struct {
	p        *Program
	ops      []Op
	accesses [][]access // by root buffer, in program order
	stream   [NumStreams]vclock
	started  [NumStreams]bool
	clock    []vclock
}

func (s *synchronizer) add(i int, before []int) {
	op := &s.ops[i]
	st := op.Stream
	if !s.started[st] {
		for t := range s.stream[st] {
			s.stream[st][t] = -1
		}
		s.started[st] = true
	}
	var need vclock
	for t := range need {
		need[t] = -1
	}
	depend := func(j int) {
		if t := s.ops[j].Stream; t != st && int32(j) > need[t] {
			need[t] = int32(j)
		}
	}
	for _, j := range before {
		depend(j)
	}
	s.touch(i, depend)
	for t := len(need) - 1; t >= 0; t-- {
		j := need[t]
		if j < 0 || s.stream[st][t] >= j {
			continue
		}
		from := &s.ops[j]
		if from.Record == 0 {
			from.Record = s.p.NewEvent()
		}
		op.Wait = append(op.Wait, from.Record)
		for u, k := range s.clock[j] {
			s.stream[st][u] = max(s.stream[st][u], k)
		}
	}
	s.stream[st][st] = int32(i)
	s.clock[i] = s.stream[st]
}

// touch records the accesses of operation i and calls conflict with each earlier operation
// that must finish before.
func (s *synchronizer) touch(i int, conflict func(int)) {
	op := &s.ops[i]
	Effects(op, func(e Effect) {
		root, lo, hi := Span(s.p, e.Buf)
		list := s.accesses[root]
		keep := list[:0]
		for _, a := range list {
			overlap := a.lo < hi && lo < a.hi
			if overlap && (e.Write || a.write) && a.op != i {
				conflict(a.op)
			}
			// An access that this write covers is ordered before it, so an operation after this
			// write also comes after that access. A read replaces earlier reads of its stream in
			// the same way.
			replaces := e.Write || !a.write && s.ops[a.op].Stream == op.Stream
			if !(replaces && lo <= a.lo && a.hi <= hi && a.op != i) {
				keep = append(keep, a)
			}
		}
		s.accesses[root] = append(keep, access{i, lo, hi, e.Write})
	})
}
