package memplan

import (
	"cmp"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// Assign places every root buffer that is used, by an operation or by the host between
// sections, in the arena of its memory space.
//
// A LifeRun buffer occupies its bytes all the time. Any other buffer has live ranges within
// a run of a section (see graph.Trace.LiveRanges). Two buffers may share bytes only if, for
// every pair of a live range of one and a live range of the other, all uses of one range
// happen before all uses of the other. Loss, GradNorm and Logits occupy their bytes from
// their first use to the end of the section. Buffers of different sections never live at the
// same time.
//
//	sweep    visits each section's steps in program order, with the ranges that may still be
//	         in use at a later step, and finds which buffers overlap in time
//	bound    finds the largest sum of live bytes at a step, over several orders in which
//	         the streams may really run
//	place    puts LifeRun buffers at the bottom, packed. Then it places the other buffers in
//	         several orders (rankings), each at the lowest free place or in the tightest gap.
//	         Then it moves the buffers that ended too high forward in the order and places
//	         all again. The smallest extent wins.
//
// The lower bound holds for every assignment under these rules. Take any order in which the streams
// may run, and two ranges that both have a use at or before step i and one at or after it. Neither
// range can come completely before the other, so all buffers live at i need separate bytes.
//
// A phase that runs 0 times uses nothing.
//
// The time depends on the number of operations and buffers, not on their sizes. Only the search in
// arenas of less than maxWork bytes is shorter. Assign fails on a malformed alignment; the program
// must pass graph.Verify. Assign may be called once.
func (a *Analysis) Assign(opt Options) (*Layout, error) {
	align, err := opt.align()
	if err != nil {
		return nil, err
	}
	p := a.p
	a.overlap(align)
	l := &Layout{Offset: make([]int64, len(p.Buffers)), Align: align}
	for i := range l.Offset {
		l.Offset[i] = -1
	}
	for sp := range graph.NumSpaces {
		base := int64(0)
		peak := int64(0)
		for _, id := range a.resident[sp] {
			l.Offset[id] = alignUp(base, a.align[id])
			peak = l.Offset[id] + a.size[id]
			base = alignUp(peak, align)
		}
		for _, id := range a.spaces[sp].ids {
			base = alignUp(base, a.align[id])
		}
		off, extent, err := a.place(sp, a.bound[sp].bytes-a.residentBytes[sp], opt)
		if err != nil {
			return nil, err
		}
		for i, id := range a.spaces[sp].ids {
			l.Offset[id] = base + off[i]
		}
		if extent > 0 {
			peak = base + extent
		}
		l.Spaces[sp] = a.report(sp, peak)
	}
	return l, nil
}

// DiskPage is the alignment in bytes of offsets on disk, and in the host memory that disk
// transfers use, because direct I/O works in whole pages.
const DiskPage = 4096

// alignments returns the alignment of every root buffer in bytes, at least least.
func alignments(p *graph.Program, least int64) []int64 {
	list := make([]int64, len(p.Buffers))
	page := max(least, DiskPage)
	disk := false
	for id := range p.Buffers {
		list[id] = least
		if p.Buffers[id].Space == graph.Disk {
			list[id], disk = page, true
		}
	}
	if !disk {
		return list
	}
	if id := p.Port(graph.PortStaging); id != graph.NoBuf {
		list[id] = page
	}
	for i := range p.Sections {
		for _, ph := range p.Sections[i].Phases {
			for k := range ph.Ops {
				op := &ph.Ops[k]
				if op.Kind != graph.Copy || len(op.In) != 1 || len(op.Out) != 1 {
					continue
				}
				from, _ := p.Resolve(op.In[0], nil)
				to, _ := p.Resolve(op.Out[0].Buf, nil)
				if p.Buf(from).Space == graph.Disk || p.Buf(to).Space == graph.Disk {
					list[from], list[to] = page, page
				}
			}
		}
	}
	return list
}

// Bounds returns the SpaceUse of each space as Assign does, but does not place buffers: Peak is the
// lower bound, and Assign's may be higher. It needs a fraction of Assign's time.
func (a *Analysis) Bounds() (uses [graph.NumSpaces]SpaceUse) {
	for sp := range graph.NumSpaces {
		uses[sp] = a.report(sp, a.bound[sp].bytes)
	}
	return uses
}

// overlap finds which buffers overlap in time. align is the least alignment of a buffer.
func (a *Analysis) overlap(align int64) {
	a.align = alignments(a.p, align)
	a.findOverlaps()
	for sp := range graph.NumSpaces {
		a.findCliques(sp)
	}
}

// findOverlaps fills the timelines of all spaces.
func (a *Analysis) findOverlaps() {
	var ranges [graph.NumSpaces][]ofBuffer
	var beside [graph.NumSpaces][][]int32
	for s := range a.spaces {
		sp := &a.spaces[s]
		beside[s] = make([][]int32, len(sp.ids))
		sp.phase = make([]int32, len(sp.ids))
		sp.late = make([]bool, len(sp.ids))
		sp.kept = make([]bool, len(sp.ids))
	}
	met := make([]bool, len(a.p.Buffers))
	base, phases := int64(0), int32(1)
	var cuts []int64
	for i := range a.sections {
		sec := &a.sections[i]
		for k, step := range sec.trace.Steps {
			if k == 0 && i > 0 || k > 0 && step.Phase != sec.trace.Steps[k-1].Phase {
				cuts = append(cuts, base+int64(k))
			}
		}
		sec.sweep(base, &ranges, &beside, a.index)
		turn := sec.turn()
		for i, r := range sec.ranges {
			sp, k := &a.spaces[a.p.Buf(r.Buf).Space], a.index[r.Buf]
			fresh := !met[r.Buf]
			if fresh {
				met[r.Buf] = true
				sp.late[k] = int(r.Steps[0]) >= turn
			}
			from, to := sec.trace.Op(int(r.Steps[0])).Pass, sec.trace.Op(sec.lastStep(int32(i))).Pass
			if int(r.Steps[0]) < turn && to != graph.Forward || from != graph.Update && to == graph.Update {
				sp.kept[k] = true
			}
			first, last := sec.trace.Steps[r.Steps[0]].Phase, sec.trace.Steps[sec.lastStep(int32(i))].Phase
			switch phase := phases + first; {
			case first == last && (fresh || sp.phase[k] == phase):
				sp.phase[k] = phase
			default:
				sp.phase[k] = 0
			}
		}
		base += int64(len(sec.trace.Steps))
		phases += int32(len(sec.trace.Section.Phases))
	}
	for s := range a.spaces {
		a.spaces[s].overlaps = newOverlaps(len(a.spaces[s].ids), ranges[s], beside[s], cuts)
	}
}

// report fills in the SpaceUse of one space. Bytes that are live at the peak are counted by
// class. All other bytes of the extent (holes, alignment) and each buffer's own padding count
// as class padding.
func (a *Analysis) report(sp graph.Space, peak int64) SpaceUse {
	b := a.bound[sp]
	u := SpaceUse{Peak: peak, LowerBound: b.bytes, Resident: a.residentBytes[sp], ClassPeak: a.classPeak[sp]}
	if peak == 0 {
		return u
	}
	u.Live = slices.Clone(a.resident[sp])
	if b.section >= 0 {
		sec := &a.sections[b.section]
		u.PeakAt = sec.trace.Label(sec.orders[b.order].step[b.pos])
		u.Live = append(a.liveAt(sp, b), b.beside...)
	}
	slices.SortStableFunc(u.Live, func(x, y graph.BufID) int {
		if c := cmp.Compare(a.size[y], a.size[x]); c != 0 {
			return c
		}
		return cmp.Compare(x, y)
	})
	rest := peak
	for _, id := range u.Live {
		buf := a.p.Buf(id)
		u.ByClass[buf.Class] += a.size[id] - buf.Pad
		rest -= a.size[id] - buf.Pad
	}
	u.ByClass[graph.Padding] += rest
	u.ClassPeak[graph.Padding] = max(u.ClassPeak[graph.Padding], u.ByClass[graph.Padding])
	return u
}
