// Package layouts checks and draws the layouts of package memplan.
package layouts

import (
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan"
)

// Check returns an error if l is not a valid plan of p. It shares no code with memplan.Assign. It runs
// every section separately, follows each byte of each buffer from its writer to its readers on
// individual ranks, and derives happens-before from reachability.
//
// A buffer is handed over from the operation w that writes a byte to each operation r that
// reads it, and each use counts as a hand-over from itself to itself. Two buffers may share
// bytes if, for each use v of one and each hand-over (w, r) of the other, v happens before w
// or r happens before v. Check looks at all ranks if there are at most 8, and otherwise at
// the first two and the last of each mesh axis.
//
// Its memory is an eighth of a byte for each pair of a section's operations, so programs have at most
// a few ten thousand operations.
func Check(p *graph.Program, l *memplan.Layout) error {
	if err := check(p, l); err != nil {
		return fmt.Errorf("layouts.Check: %w", err)
	}
	return nil
}

func check(p *graph.Program, l *memplan.Layout) error {
	if len(l.Offset) != len(p.Buffers) {
		return fmt.Errorf("the layout has %d offsets, want one for each of the program's %d buffers", len(l.Offset), len(p.Buffers))
	}
	if l.Align < 1 || l.Align&(l.Align-1) != 0 {
		return fmt.Errorf("alignment %d is not a power of two", l.Align)
	}
	if err := checkIDs(p); err != nil {
		return err
	}
	runs := make([]*checkRun, len(p.Sections))
	used := make([]bool, len(p.Buffers))
	for i := range p.Sections {
		runs[i] = newCheckRun(p, &p.Sections[i])
		for _, op := range runs[i].ops {
			for _, u := range checkUses(op) {
				root, _ := p.Resolve(u.buf, nil)
				used[root] = true
			}
		}
	}
	for _, id := range p.HostBuffers() {
		root, _ := p.Resolve(id, nil)
		used[root] = true
	}
	if err := checkPlaces(p, l, used); err != nil {
		return err
	}
	for _, run := range runs {
		for _, coord := range checkCoords(p) {
			run.follow(p, coord)
		}
	}
	// Find pairs of buffers with common bytes, in order of their offsets.
	var byOffset []graph.BufID
	for id := range p.Buffers {
		if used[id] {
			byOffset = append(byOffset, graph.BufID(id))
		}
	}
	slices.SortFunc(byOffset, func(x, y graph.BufID) int {
		if d := l.Offset[x] - l.Offset[y]; d != 0 {
			return int(min(max(d, -1), 1))
		}
		return int(x - y)
	})
	var open []graph.BufID
	for _, y := range byOffset {
		keep := open[:0]
		for _, x := range open {
			if l.Offset[x]+p.Buf(x).Bytes() <= l.Offset[y] {
				continue
			}
			keep = append(keep, x)
			if p.Buf(x).Space != p.Buf(y).Space {
				continue
			}
			for _, run := range runs {
				if err := run.clash(p, x, y); err != nil {
					return fmt.Errorf("%v bytes from %d: %w", p.Buf(x).Space, l.Offset[y], err)
				}
			}
			if p.Buf(x).Life == graph.LifeRun || p.Buf(y).Life == graph.LifeRun {
				return fmt.Errorf("%v bytes from %d: %s and %s overlap, and one of them lives all the time",
					p.Buf(x).Space, l.Offset[y], p.Buf(x).Name, p.Buf(y).Name)
			}
		}
		open = append(keep, y)
	}
	return nil
}

// checkIDs rejects operands that are not buffers of p, and views without a root.
func checkIDs(p *graph.Program) error {
	ok := func(id graph.BufID) bool { return id >= 0 && int(id) < len(p.Buffers) }
	for _, id := range []graph.BufID{p.Loss, p.GradNorm, p.Logits} {
		if id != graph.NoBuf && !ok(id) {
			return fmt.Errorf("the loss, gradient norm or logits are buffer %d, want one of the program's %d", id, len(p.Buffers))
		}
	}
	for id := range p.Buffers {
		at := graph.BufID(id)
		for depth := 0; p.Buf(at).View != nil; depth++ {
			v := p.Buf(at).View
			if !ok(v.Base) || depth > len(p.Buffers) || v.RankStride != 0 && (v.Axis < 0 || v.Axis >= len(p.Mesh)) {
				return fmt.Errorf("buffer %s is a view without a root buffer or mesh axis", p.Buf(graph.BufID(id)).Name)
			}
			at = v.Base
		}
	}
	for i := range p.Sections {
		for _, ph := range p.Sections[i].Phases {
			for j := range ph.Ops {
				for _, u := range checkUses(&ph.Ops[j]) {
					if !ok(u.buf) {
						return fmt.Errorf("%s/%s/%s uses buffer %d, want one of the program's %d", p.Sections[i].Name, ph.Name, ph.Ops[j].Name, u.buf, len(p.Buffers))
					}
				}
			}
		}
	}
	return nil
}

// checkPlaces checks each buffer's offset and, for each space, that Peak is the highest end of
// a buffer, that ByClass sums to Peak, and that LowerBound is at most Peak.
func checkPlaces(p *graph.Program, l *memplan.Layout, used []bool) error {
	var extent [graph.NumSpaces]int64
	for id, off := range l.Offset {
		b := p.Buf(graph.BufID(id))
		switch {
		case !used[id] && off != -1:
			return fmt.Errorf("%s has offset %d, want -1: it is a view or no operation uses it, nor the host", b.Name, off)
		case !used[id]:
		case off < 0:
			return fmt.Errorf("%s has offset %d, but it is used", b.Name, off)
		case off%l.Align != 0:
			return fmt.Errorf("%s has offset %d, want a multiple of %d", b.Name, off, l.Align)
		case b.Space == graph.Disk && off%4096 != 0:
			return fmt.Errorf("%s has offset %d on disk, want a multiple of 4096", b.Name, off)
		case off+b.Bytes() > l.Spaces[b.Space].Peak:
			return fmt.Errorf("%s ends at byte %d, above the %v peak of %d", b.Name, off+b.Bytes(), b.Space, l.Spaces[b.Space].Peak)
		default:
			extent[b.Space] = max(extent[b.Space], off+b.Bytes())
		}
	}
	for i, u := range l.Spaces {
		sp, sum := graph.Space(i), int64(0)
		for c, bytes := range u.ByClass {
			sum += bytes
			if bytes < 0 || bytes > u.ClassPeak[c] {
				return fmt.Errorf("%v: %d bytes of %v at the peak, want 0 to the class's own peak of %d", sp, bytes, graph.Class(c), u.ClassPeak[c])
			}
		}
		switch {
		case extent[i] != u.Peak:
			return fmt.Errorf("%v: the peak is %d, but the highest buffer ends at byte %d", sp, u.Peak, extent[i])
		case sum != u.Peak:
			return fmt.Errorf("%v: the classes sum to %d at the peak of %d", sp, sum, u.Peak)
		case u.LowerBound > u.Peak:
			return fmt.Errorf("%v: the lower bound %d is above the peak %d", sp, u.LowerBound, u.Peak)
		}
	}
	return nil
}

type checkUse struct {
	buf         graph.BufID
	read, write bool
}

// checkUses lists the operands of op. A write that may be skipped leaves the old contents, so
// it also counts as a read.
func checkUses(op *graph.Op) []checkUse {
	var list []checkUse
	for _, id := range op.In {
		list = append(list, checkUse{id, true, false})
	}
	list = append(list, checkUse{op.Skip, true, false}, checkUse{op.Work, false, true})
	for _, o := range op.Out {
		list = append(list, checkUse{o.Buf, o.Mode != graph.Write || op.Skip != graph.NoBuf, true})
	}
	return slices.DeleteFunc(list, func(u checkUse) bool { return u.buf == graph.NoBuf })
}

// checkCoords returns the mesh coordinates of the ranks that Check looks at.
func checkCoords(p *graph.Program) [][]int {
	coords := [][]int{{}}
	for _, axis := range p.Mesh {
		var at []int
		for i := range axis.Size {
			if p.WorldSize() <= 8 || i < 2 || i == axis.Size-1 {
				at = append(at, i)
			}
		}
		var next [][]int
		for _, c := range coords {
			for _, i := range at {
				next = append(next, append(slices.Clone(c), i))
			}
		}
		coords = next
	}
	return coords
}

// checkRun is one run of a section, with repeated phases twice.
type checkRun struct {
	name  string
	ops   []*graph.Op
	label []string
	part  []int // by step: number of the phase's copy that contains it
	words int
	after []uint64 // by step: the set of steps before which it happens

	uses  map[graph.BufID][]int    // by root buffer
	hands map[graph.BufID][][2]int // by root buffer: writer and reader
}

func newCheckRun(p *graph.Program, s *graph.Section) *checkRun {
	r := &checkRun{name: s.Name, uses: map[graph.BufID][]int{}, hands: map[graph.BufID][][2]int{}}
	parts := 0
	for i := range s.Phases {
		ph := &s.Phases[i]
		for rep := 0; rep < ph.Repeat && rep < 2; rep++ {
			for j := range ph.Ops {
				r.ops = append(r.ops, &ph.Ops[j])
				r.label = append(r.label, s.Name+"/"+ph.Name+"/"+ph.Ops[j].Name)
				r.part = append(r.part, parts)
			}
			parts++
		}
	}
	n := len(r.ops)
	r.label = append(r.label, "the end")
	next := make([][]int, n) // direct successors
	lastOn := map[graph.StreamID]int{}
	lastRecord := map[graph.EventID]int{}
	for i, op := range r.ops {
		if j, ok := lastOn[op.Stream]; ok {
			next[j] = append(next[j], i)
		}
		for _, e := range op.Wait {
			if j, ok := lastRecord[e]; ok {
				next[j] = append(next[j], i)
			}
		}
		lastOn[op.Stream] = i
		if op.Record != 0 {
			lastRecord[op.Record] = i
		}
	}
	r.words = (n + 63) / 64
	r.after = make([]uint64, n*r.words)
	for i := n - 1; i >= 0; i-- {
		row := r.after[i*r.words : (i+1)*r.words]
		for _, j := range next[i] {
			row[j/64] |= 1 << (j % 64)
			for w, bits := range r.after[j*r.words : (j+1)*r.words] {
				row[w] |= bits
			}
		}
	}
	return r
}

// end is the step number for everything after the section.
func (r *checkRun) end() int { return len(r.ops) }

func (r *checkRun) before(i, j int) bool {
	return i < r.end() && r.after[i*r.words+j/64]>>(j%64)&1 == 1
}

// follow runs the section on one rank and collects the hand-overs: for each buffer, which step
// writes bytes that which step reads.
func (r *checkRun) follow(p *graph.Program, coord []int) {
	type piece struct {
		lo, hi int64
		writer int
	}
	held := map[graph.BufID][]piece{} // by root: the last writer of each piece of it
	for i, op := range r.ops {
		uses := checkUses(op)
		for _, u := range uses {
			root, lo := p.Resolve(u.buf, coord)
			if n := len(r.uses[root]); n == 0 || r.uses[root][n-1] != i {
				r.uses[root] = append(r.uses[root], i)
				r.hands[root] = append(r.hands[root], [2]int{i, i})
			}
			if !u.read {
				continue
			}
			hi := lo + p.Buf(u.buf).Bytes()
			for _, h := range held[root] {
				inPhase := p.Buf(root).Life != graph.LifePhase || r.part[h.writer] == r.part[i]
				if h.lo < hi && lo < h.hi && inPhase {
					r.hands[root] = append(r.hands[root], [2]int{h.writer, i})
				}
			}
		}
		for _, u := range uses {
			if !u.write {
				continue
			}
			root, lo := p.Resolve(u.buf, coord)
			hi := lo + p.Buf(u.buf).Bytes()
			var list []piece
			for _, h := range held[root] {
				if h.lo < lo {
					list = append(list, piece{h.lo, min(h.hi, lo), h.writer})
				}
				if hi < h.hi {
					list = append(list, piece{max(h.lo, hi), h.hi, h.writer})
				}
			}
			held[root] = append(list, piece{lo, hi, i})
		}
	}
	for _, id := range []graph.BufID{p.Loss, p.GradNorm, p.Logits} { // the host reads them afterwards
		if id != graph.NoBuf {
			root, _ := p.Resolve(id, coord)
			for _, h := range held[root] {
				r.hands[root] = append(r.hands[root], [2]int{h.writer, r.end()})
			}
		}
	}
	for root, list := range r.hands {
		slices.SortFunc(list, func(a, b [2]int) int {
			if a[0] != b[0] {
				return a[0] - b[0]
			}
			return a[1] - b[1]
		})
		r.hands[root] = slices.Compact(list)
	}
	for root, list := range r.uses {
		slices.Sort(list)
		r.uses[root] = slices.Compact(list)
	}
}

// clash returns an error if a use of one of the two buffers may happen between the writer and
// the reader of a hand-over of the other.
func (r *checkRun) clash(p *graph.Program, x, y graph.BufID) error {
	for range 2 {
		for _, h := range r.hands[x] {
			for _, v := range r.uses[y] {
				if !r.before(v, h[0]) && !r.before(h[1], v) {
					return fmt.Errorf("%s is in use from %s to %s, and %s at %s, with nothing that keeps them apart",
						p.Buf(x).Name, r.label[h[0]], r.label[h[1]], p.Buf(y).Name, r.label[v])
				}
			}
		}
		x, y = y, x
	}
	return nil
}

// Assign analyses and places a program.
func Assign(p *graph.Program, o memplan.Options) (*memplan.Layout, error) {
	a, err := memplan.Analyse(p)
	if err != nil {
		return nil, err
	}
	return a.Assign(o)
}
