package graph

// Runs lists runs of operations of one stream, as indices in order, that a device may take
// for one: nothing waits for another stream's event but the first of them, and none records
// an event but the last, so that what is ordered by events stays as it is. Each run is as
// long as can be and has at least min operations. in says which operations can be part of
// one; before any index of cuts a run ends.
func Runs(ops []Op, s StreamID, min int, in func(i int) bool, cuts []int) (runs [][]int) {
	var now []int
	end := func() {
		if len(now) >= min {
			runs = append(runs, now)
		}
		now = nil
	}
	next := 0
	for i := range ops {
		for ; next < len(cuts) && cuts[next] <= i; next++ {
			end()
		}
		op := &ops[i]
		if op.Stream != s {
			continue
		}
		if len(op.Wait) > 0 || !in(i) {
			end()
		}
		if in(i) {
			now = append(now, i)
		}
		if op.Record != 0 {
			end()
		}
	}
	end()
	return runs
}

// MinRun is the fewest operations that are worth one launch in place of theirs.
const MinRun = 4

// Pairs lists pairs of operations of a stream, as indices, that a device may run as one at
// the second one's place: the second is the next on the stream, neither has a predicate, and
// the first records no event, so that nothing but its own stream waits for it. joins says
// which of them are one; an operation is in one pair at most.
func Pairs(ops []Op, s StreamID, joins func(first, second int) bool) (pairs [][2]int) {
	first := -1
	for i := range ops {
		op := &ops[i]
		if op.Stream != s {
			continue
		}
		switch {
		case op.Kind == Join || op.Skip != NoBuf:
			first = -1
		case first >= 0 && joins(first, i):
			pairs = append(pairs, [2]int{first, i})
			first = -1
		case op.Record != 0:
			first = -1
		default:
			first = i
		}
	}
	return pairs
}
