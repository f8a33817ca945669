package offload

import (
	"cmp"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// smallest is the smallest size of an activation that is worth a copy, relative to the largest
// parked activation: norm statistics stay on the device.
const smallest = 1.0 / 32

// park copies activations with a long gap between uses to host memory (or through it to disk) after
// the last use before the gap, and back into a new buffer before the next use:
//
//	compute:   x = f │ g(x) │ … a+1+Ahead ●… │ …      │ …  b │ g'(x₂)
//	copy-out:              park x → h ●
//	copy-in:                                   ● fetch h → x₂   Ahead stretches before b
//
// A stretch is a run of operations of the compute stream of one unit and micro-batch. a is the
// stretch of the last use before the gap and b that of the first use after. Stretch a+1+Ahead waits
// for the copy out, so x's bytes are free from that stretch on. The copy in waits for the end of
// stretch b−1−Ahead. If there are fewer stretches between the two, parking would free no memory and
// the activation stays. Fetches are in the order of their uses, which in a backward is the reverse
// of the order of parking.
//
// In layer order an activation between two blocks is unused while the other micro-batches pass the
// same block. Such a gap is too short for parking: all these activations would be copied out and
// immediately copied back.
func (r *rewriter) park(w *weave) {
	stretch, run, ends := stretches(w)
	chosen := r.chooseParked(w, stretch, run)
	for _, c := range chosen {
		r.parkOut(w, c, stretch, ends)
	}
	slices.SortStableFunc(chosen, func(a, b idle) int { return cmp.Compare(a.after[0], b.after[0]) })
	for _, c := range chosen {
		r.fetchBack(w, c, stretch, ends)
	}
}

// idle is an activation with a long gap between uses in a phase.
type idle struct {
	root   graph.BufID
	before int   // last operation that uses it before the gap
	after  []int // operations that use it after the gap
}

// parkable finds the activations that may leave the device, ordered by first use, and their uses.
func (r *rewriter) parkable(w *weave) (roots []graph.BufID, uses [][]int) {
	uses = make([][]int, len(r.p.Buffers)) // by root
	known, leaves := make([]bool, len(uses)), make([]bool, len(uses))
	for i, n := range w.Base {
		effects(&n.Op, r.root, func(root graph.BufID, e graph.Effect) {
			b := r.p.Buf(root)
			if b.Class != graph.Activations || b.Life != graph.LifePhase || b.Space != graph.Device {
				return
			}
			if !known[root] {
				known[root], leaves[root] = true, r.o.parkSpace(b.PlainName()) != graph.Device
			}
			if !leaves[root] {
				return
			}
			list := uses[root]
			if len(list) == 0 {
				roots = append(roots, root)
			}
			if len(list) == 0 || list[len(list)-1] != i {
				uses[root] = append(list, i)
			}
		})
	}
	return roots, uses
}

// chooseParked returns the activations for which parking frees memory, ordered by the last use
// before the gap. stretch and run number each operation's stretch and run, as stretches
// returns them.
func (r *rewriter) chooseParked(w *weave, stretch, run []int) []idle {
	var chosen []idle
	var largest int64
	roots, uses := r.parkable(w)
	for _, root := range roots {
		list := uses[root]
		best, at := 0, 0
		for k := 1; k < len(list); k++ {
			if gap := stretch[list[k]] - stretch[list[k-1]]; gap > best && run[list[k]]-run[list[k-1]] > 1 {
				best, at = gap, k
			}
		}
		if best <= 2*r.o.Ahead+1 || !readsFirst(r, &w.Base[list[at]].Op, root) {
			continue
		}
		chosen = append(chosen, idle{root, list[at-1], list[at:]})
		largest = max(largest, r.p.Buf(root).Bytes())
	}
	slices.SortStableFunc(chosen, func(a, b idle) int { return cmp.Compare(a.before, b.before) })
	kept := chosen[:0]
	for _, c := range chosen {
		if b := r.p.Buf(c.root); float64(b.Bytes()) >= smallest*float64(largest) || r.o.named(b.PlainName()) {
			kept = append(kept, c)
		}
	}
	return kept
}

// parkOut inserts the copies of an activation from the device to its place.
func (r *rewriter) parkOut(w *weave, c idle, stretch []int, ends [][2]int) {
	pk := r.parking(c.root)
	from, name, op := c.root, r.p.Buf(c.root).Name, &w.Base[c.before].Op
	var first *graph.Node
	for _, to := range pk.stops[:(len(pk.stops)+2)/2] {
		n := w.After(c.before, w.transfer(r.p, name, from, to, op.Pass, op.Unit))
		if first == nil {
			first = n
		} else {
			w.bounces[first] = n
		}
		from = to
	}
	if s := stretch[c.before] + 1 + r.o.Ahead; s < len(ends) {
		w.Throttle(first, w.Base[ends[s][0]])
	}
}

// fetchBack inserts the copies back into a new buffer, from which later uses read.
func (r *rewriter) fetchBack(w *weave, c idle, stretch []int, ends [][2]int) {
	pk := r.parking(c.root)
	name, op := r.p.Buf(c.root).Name, &w.Base[c.after[0]].Op
	s := stretch[c.after[0]] - r.o.Ahead
	at := ends[s][0]
	path := append(append([]graph.BufID(nil), pk.stops[len(pk.stops)/2:]...), pk.fetched)
	var loaded *graph.Node
	for k := 1; k < len(path); k++ {
		n := w.Before(at, w.transfer(r.p, name, path[k-1], path[k], op.Pass, op.Unit))
		if k == 1 {
			w.Throttle(w.Base[ends[s-1][1]], n)
			loaded = n
		} else {
			w.bounces[loaded] = n
		}
	}
	co := coherence{r: r, w: w}
	for _, i := range c.after {
		co.redirect(&w.Base[i].Op, c.root, pk.fetched, c.root)
	}
}

// parking returns the parking of an activation, which all phases share.
func (r *rewriter) parking(root graph.BufID) *parking {
	pk := r.parked[root]
	if pk != nil {
		return pk
	}
	twin := func(suffix string, space graph.Space, class graph.Class) graph.BufID {
		b := *r.p.Buf(root)
		b.Name, b.Space, b.Class = b.Name+suffix, space, class
		return r.p.AddBuffer(b)
	}
	pk = &parking{}
	if r.o.parkSpace(r.p.Buf(root).PlainName()) == graph.Disk {
		pk.stops = []graph.BufID{twin("@host/out", graph.Host, graph.Communication), twin("@disk", graph.Disk, graph.Activations), twin("@host/in", graph.Host, graph.Communication)}
	} else {
		pk.stops = []graph.BufID{twin("@host", graph.Host, graph.Activations)}
	}
	pk.fetched = twin("@fetched", graph.Device, graph.Activations)
	r.parked[root] = pk
	return pk
}

// readsFirst says whether an operation reads the root, so that it needs the contents.
func readsFirst(r *rewriter, op *graph.Op, root graph.BufID) bool {
	reads := false
	effects(op, r.root, func(id graph.BufID, e graph.Effect) { reads = reads || id == root && e.Read })
	return reads
}

// stretches numbers the phase's operations: runs by stretches of compute operations of one unit, of
// by those of one unit and micro-batch. An operation of another stream has the previous operation's
// number. ends has the first and last compute operation of each number in of.
func stretches(w *weave) (of, runs []int, ends [][2]int) {
	unit, micro, run := -2, 0, 0
	for i, n := range w.Base {
		if n.Op.Stream == graph.Compute {
			if n.Op.Unit != unit {
				run++
			}
			if n.Op.Unit != unit || n.Op.Micro != micro {
				unit, micro = n.Op.Unit, n.Op.Micro
				ends = append(ends, [2]int{i, i})
			}
			ends[len(ends)-1][1] = i
		}
		of, runs = append(of, max(0, len(ends)-1)), append(runs, run)
	}
	return of, runs, ends
}
