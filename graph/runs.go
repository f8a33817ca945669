package graph

// Runs lists runs of operations of one stream, as indices in order, that a device may launch at
// once, for example as a CUDA graph. Only a run's first operation may wait for another stream's
// event and only its last may record one, so that the order by events is kept. Each run is as long
// as possible and has at least min operations. in says which operations can be part of a run; a run
// ends before each index in cuts.
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

// MinRun is the smallest number of operations for which a combined launch is faster.
const MinRun = 4

// Pairs lists pairs of operations of a stream, as indices, that a device may run as one operation
// at the place of the second. The second must be the next operation on the stream, and neither may
// have a predicate (Skip). The first must record no event, so that only its own stream waits for
// it. joins says which pairs can be run as one. No operation is in two pairs.
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
