package memplan

import "github.com/spillway-ml/spillway/graph"

// Analysis holds the live ranges of a program's buffers and the lower bounds of its peaks.
type Analysis struct {
	p             *graph.Program
	size          []int64                        // bytes, by BufID
	align         []int64                        // by BufID
	resident      [graph.NumSpaces][]graph.BufID // used LifeRun buffers
	residentBytes [graph.NumSpaces]int64
	spaces        [graph.NumSpaces]timeline
	index         []int32 // by BufID: index into its space's timeline
	sections      []section
	bound         [graph.NumSpaces]bound
	floor         [graph.NumSpaces]int64 // like bound, with alignment and without resident buffers
	work          [graph.NumSpaces]int64 // pairs of buffers that place has compared
	classPeak     [graph.NumSpaces][graph.NumClasses]int64
}

// timeline has the used buffers of one space that are not LifeRun, and records which of them
// overlap in time.
type timeline struct {
	ids       []graph.BufID
	*overlaps         // by index into ids, like the fields below
	late      []bool  // first used at section.turn or later
	kept      []bool  // kept from the forward to the backward, or for the update
	phase     []int32 // the phase, if only one uses it, numbered from 1 over all sections; 0: several do
}

// bound is the largest sum of live bytes of a space, and where it occurs: the position in an order
// of a section. section is −1 if nothing runs.
type bound struct {
	bytes               int64
	section, order, pos int
	beside              []graph.BufID // buffers of concurrent steps that findCliques added
}

// Analyse finds live ranges and bounds. It fails if a view or an operation's reference is invalid.
func Analyse(p *graph.Program) (*Analysis, error) {
	regions, err := graph.NewRegions(p)
	if err != nil {
		return nil, err
	}
	a := &Analysis{p: p, size: make([]int64, len(p.Buffers)), index: make([]int32, len(p.Buffers))}
	used := make([]bool, len(p.Buffers))
	for i := range p.Sections {
		t, err := graph.NewTrace(p, regions, &p.Sections[i])
		if err != nil {
			return nil, err
		}
		for step := range t.Steps {
			graph.Effects(t.Op(step), func(e graph.Effect) { used[regions.Of[e.Buf].Root] = true })
		}
		a.sections = append(a.sections, newSection(p, t))
	}
	for _, id := range p.HostBuffers() {
		used[regions.Of[id].Root] = true
	}
	for id := range p.Buffers {
		b := &p.Buffers[id]
		a.size[id] = b.Bytes()
		sp := &a.spaces[b.Space]
		switch {
		case !used[id]:
		case b.Life == graph.LifeRun:
			a.resident[b.Space] = append(a.resident[b.Space], graph.BufID(id))
			a.residentBytes[b.Space] += a.size[id]
		default:
			a.index[id] = int32(len(sp.ids))
			sp.ids = append(sp.ids, graph.BufID(id))
		}
	}
	a.findBounds()
	return a, nil
}

// findBounds sums live bytes by space and class at every step of a section, in each of its orders.
func (a *Analysis) findBounds() {
	parts := a.parts()
	var resident sums
	for _, ids := range a.resident {
		for _, id := range ids {
			resident.add(&parts[id], 1)
		}
	}
	a.classPeak = resident
	for sp := range a.bound { // the bound of a program that runs nothing
		a.bound[sp] = bound{bytes: a.residentBytes[sp], section: -1}
	}
	var lives []lived
	var next [][2]int32 // by life: the next life with the same start, and with the same end; −1: none
	var begin []int32   // by step: the last life that starts there; −1: none
	var end []int32     // by step: the last life that ends there
	for si := range a.sections {
		sec := &a.sections[si]
		n := len(sec.trace.Steps)
		for len(begin) < n {
			begin, end = append(begin, -1), append(end, -1)
		}
		for sp := range a.bound {
			if n > 0 && a.bound[sp].section < 0 {
				a.bound[sp].section = si
			}
		}
		for oi := range sec.orders {
			for i := range n {
				begin[i], end[i] = -1, -1
			}
			lives, next = sec.appendLives(lives[:0], oi), next[:0]
			for k, l := range lives {
				next = append(next, [2]int32{begin[l.from], end[l.to]})
				begin[l.from], end[l.to] = int32(k), int32(k)
			}
			now, total := resident, a.residentBytes
			for pos := range n {
				for k := begin[pos]; k >= 0; k = next[k][0] {
					pt := &parts[lives[k].buf]
					now.add(pt, 1)
					total[pt.space] += pt.own + pt.pad
					if a.raise(pt, &now, total[pt.space]) {
						a.bound[pt.space] = bound{bytes: total[pt.space], section: si, order: oi, pos: pos}
					}
				}
				for k := end[pos]; k >= 0; k = next[k][1] {
					pt := &parts[lives[k].buf]
					now.add(pt, -1)
					total[pt.space] -= pt.own + pt.pad
				}
			}
		}
	}
}

// sums are live bytes by space and class.
type sums [graph.NumSpaces][graph.NumClasses]int64

// part holds the fields of a buffer that findBounds adds up. A graph.Buffer is ten times as large,
// so a list of them does not stay in the processor's cache.
type part struct {
	own, pad int64 // bytes
	space    graph.Space
	class    graph.Class
}

// parts lists the part of each buffer.
func (a *Analysis) parts() []part {
	list := make([]part, len(a.p.Buffers))
	for id := range list {
		b := &a.p.Buffers[id]
		list[id] = part{a.size[id] - b.Pad, b.Pad, b.Space, b.Class}
	}
	return list
}

func (s *sums) add(pt *part, sign int64) {
	s[pt.space][pt.class] += sign * pt.own
	s[pt.space][graph.Padding] += sign * pt.pad
}

// raise raises the peaks of a buffer's classes to the live bytes now, which include the buffer, if
// these are higher. It reports whether the total of the buffer's space is higher than its bound.
func (a *Analysis) raise(pt *part, now *sums, total int64) bool {
	peak, live := &a.classPeak[pt.space], &now[pt.space]
	peak[pt.class] = max(peak[pt.class], live[pt.class])
	peak[graph.Padding] = max(peak[graph.Padding], live[graph.Padding])
	return total > a.bound[pt.space].bytes
}
