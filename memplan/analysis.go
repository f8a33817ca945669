package memplan

import "github.com/spillway-ml/spillway/graph"

// Analysis has the live ranges of a program's buffers and the lower bounds of its peaks.
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

// timeline has the used buffers of one space that are not LifeRun, and which of them overlap
// in time.
type timeline struct {
	ids       []graph.BufID
	*overlaps         // by index into ids, like the fields below
	late      []bool  // first used at section.turn or later
	kept      []bool  // kept from the forward to the backward, or for the update
	phase     []int32 // the only phase that uses it, numbered from 1 over all sections; 0: several do
}

// bound is the largest sum of live bytes of a space, and the position in an order of a section
// at which it occurs. section is −1 if nothing runs.
type bound struct {
	bytes               int64
	section, order, pos int
	beside              []graph.BufID // buffers of concurrent steps that findCliques added
}

// Analyse finds live ranges and bounds. It fails where Assign does.
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
	var resident sums
	for _, ids := range a.resident {
		for _, id := range ids {
			resident.add(a, id, 1)
		}
	}
	a.classPeak = resident
	for sp := range a.bound { // the bound of a program that runs nothing
		a.bound[sp] = bound{bytes: a.residentBytes[sp], section: -1}
	}
	var lives []lived
	var next [][2]int32 // by life: the next that starts, and that ends, at the same step; −1: none
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
					now.add(a, lives[k].buf, 1)
					a.raise(&now, &total, lives[k].buf, bound{section: si, order: oi, pos: pos})
				}
				for k := end[pos]; k >= 0; k = next[k][1] {
					now.add(a, lives[k].buf, -1)
					total[a.p.Buf(lives[k].buf).Space] -= a.size[lives[k].buf]
				}
			}
		}
	}
}

// sums are live bytes by space and class.
type sums [graph.NumSpaces][graph.NumClasses]int64

func (s *sums) add(a *Analysis, id graph.BufID, sign int64) {
	b := a.p.Buf(id)
	s[b.Space][b.Class] += sign * (a.size[id] - b.Pad)
	s[b.Space][graph.Padding] += sign * b.Pad
}

// raise adds a buffer, which is in now, to the total of its space, and raises the peaks to the live
// bytes, if these are higher.
func (a *Analysis) raise(now *sums, total *[graph.NumSpaces]int64, id graph.BufID, at bound) {
	b := a.p.Buf(id)
	peak := &a.classPeak[b.Space]
	for _, c := range [...]graph.Class{b.Class, graph.Padding} {
		peak[c] = max(peak[c], now[b.Space][c])
	}
	total[b.Space] += a.size[id]
	if total[b.Space] > a.bound[b.Space].bytes {
		at.bytes = total[b.Space]
		a.bound[b.Space] = at
	}
}
