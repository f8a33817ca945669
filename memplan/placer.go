package memplan

import (
	"cmp"
	"slices"
)

// fit selects one of the free places for a buffer.
type fit uint8

const (
	lowest   fit = iota
	tightest     // in the smallest gap
	highest      // directly below the ceiling, or the lowest if nothing below it is free
	// fromBothEnds is highest for buffers that are made in the backward and kept, and lowest for
	// others. In the backward, kept activations are freed like a stack while reduced gradients are
	// added. At opposite ends of the arena, they leave one connected gap.
	fromBothEnds
)

// placer places buffers in sequence at offsets where no buffer that overlaps them in time has
// bytes.
type placer struct {
	tl    *timeline
	align []int64
	size  []int64
	// For fromBothEnds: the ceiling, and by buffer whether it is placed directly below the ceiling.
	ceiling int64
	high    []bool
	group   []int32 // by buffer: see groups
	lists   []list  // by group; for runFew
	// For runMany: the placed buffers by group, and each buffer's position in the order of
	// this run.
	placed []placedGroup
	order  []int32
	seeker *seeker
	// The best placement so far and its extent, and the lower bound of any extent.
	best          []int64
	extent, bound int64
	floor         int64 // see Analysis
	work          int64 // pairs of buffers compared so far
	known         *Known
	digest        []byte // see lives; nil: not computed yet
	stop          func() error
	stopped       error // the error of stop; later placements are invalid
}

// prepare makes the data that all runs share.
func (pl *placer) prepare() {
	if pl.group != nil {
		return
	}
	var n int
	pl.group, n = pl.tl.groups()
	pl.placed, pl.lists = make([]placedGroup, n), make([]list, n)
	pl.seeker = newSeeker(pl.tl.overlaps)
}

// where returns the fit of one buffer.
func (pl *placer) where(i int32, how fit) fit {
	switch {
	case how != fromBothEnds:
		return how
	case pl.high[i]:
		return highest
	}
	return lowest
}

// stopAt calls stop every stopEvery buffers, and says whether the search must end.
func (pl *placer) stopAt(k int) bool {
	if pl.stop != nil && k%stopEvery == 0 {
		pl.stopped = pl.stop()
	}
	return pl.stopped != nil
}

// groups numbers buffers by the phase that uses them, so that a search can skip other phases:
// a buffer of group g > 0 overlaps in time only with buffers of groups g and 0 (several
// phases). Phases that no barrier separates form one group.
func (tl *timeline) groups() (group []int32, n int) {
	group = slices.Clone(tl.phase)
	n = 1
	for _, g := range group {
		n = max(n, int(g)+1)
	}
	into := make([]int32, n)
	for g := range into {
		into[g] = int32(g)
	}
	find := func(g int32) int32 {
		for into[g] != g {
			g = into[g]
		}
		return g
	}
	join := func(g, h int32) {
		if g != 0 && h != 0 {
			g, h = find(g), find(h)
			into[max(g, h)] = min(g, h)
		}
	}
	// Find ranges of different phases that share a step, by counting the running ranges of each
	// phase.
	spans := tl.stabber().span
	byEnd := slices.Clone(spans)
	slices.SortFunc(byEnd, func(x, y ofBuffer) int { return cmp.Compare(x.to, y.to) })
	running := make([]int, n)
	for _, s := range spans {
		for ; byEnd[0].to < s.from; byEnd = byEnd[1:] {
			running[group[byEnd[0].buf]]--
		}
		for h, count := range running {
			if count > 0 {
				join(group[s.buf], int32(h))
			}
		}
		running[group[s.buf]]++
	}
	for i, list := range tl.beside {
		for _, j := range list {
			join(group[i], group[j])
		}
	}
	for i, g := range group {
		group[i] = find(g)
	}
	return group, n
}

func alignUp(n, align int64) int64 { return (n + align - 1) &^ (align - 1) }
