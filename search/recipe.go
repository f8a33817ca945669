package search

import (
	"cmp"
	"math"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// item is one kind of activation or one class of units' states, with the moves that
// there are for it; −1: none.
type item struct {
	name             string
	drop, host, disk int
	class            graph.Class
	state            bool    // it is a class
	bytes            float64 // of device memory
}

// items are all kinds of activations, what is dearest to compute again first, and then
// the classes, what a step reads most often first: host memory goes to them in this order.
func (set *moveSet) items() (list []item) {
	index := map[string]int{}
	for i := range set.moves {
		mv := &set.moves[i]
		key := mv.before + "\x00" + mv.after
		if mv.kind == placeMove {
			key = mv.class.String()
		}
		at, ok := index[key]
		if !ok {
			at = len(list)
			index[key] = at
			list = append(list, item{key, -1, -1, -1, mv.class, mv.kind == placeMove, mv.bytes})
		}
		switch it := &list[at]; {
		case mv.kind == dropMove:
			it.drop = i
		case mv.space == graph.Host:
			it.host, it.bytes = i, max(it.bytes, mv.bytes)
		default:
			it.disk = i
		}
	}
	reads := []graph.Class{graph.Activations, graph.Parameters, graph.Gradients, graph.Optimizer}
	rank := func(it item) int {
		if !it.state {
			return 0
		}
		return slices.Index(reads, it.class)
	}
	slices.SortStableFunc(list, func(a, b item) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(set.dropRatio(b), set.dropRatio(a)))
	})
	return list
}

// dropRatio is what an item takes to be computed again, in seconds for a byte; +Inf: it
// cannot be.
func (set *moveSet) dropRatio(it item) float64 {
	if it.drop < 0 {
		return math.Inf(1)
	}
	return set.moves[it.drop].seconds / set.moves[it.drop].bytes
}

// stepsOf is in how many parts an item is moved: layers, or percent of a class.
func (it *item) stepsOf(set *moveSet, layers int) int {
	if it.state {
		return 100
	}
	return set.moves[max(it.drop, it.host, it.disk)].layers(layers)
}

// way is what becomes of an item that does not stay on the device.
type way int

const (
	again  way = iota // computed again
	away              // to the host, and to disk what the host has no room for
	toDisk            // to disk
)

// wholeItem is the part of a choice that is all of its item: parts are in sixteenths.
const wholeItem = 16

// choice is an item, by its number, and what becomes of it. A part leaves
// whatever the cap asks for: the update of what is on the host runs beside what the device
// does, so that a step may take less with it. 0: as much of it leaves as the cap asks for.
type choice struct {
	item int
	how  way
	part int
}

// recipe lists what leaves the device, in that order: first the parts, then as much as the
// cap asks for.
type recipe []choice

// wholly is a recipe of which all leaves.
func (r recipe) wholly() recipe {
	r = slices.Clone(r)
	for i := range r {
		r[i].part = wholeItem
	}
	return r
}

// key tells recipes apart: there are fewer than 65,536 items, and a part is at most wholeItem.
func (r recipe) key() string {
	b := make([]byte, 0, 4*len(r))
	for _, c := range r {
		b = append(b, byte(c.item), byte(c.item>>8), byte(c.how), byte(c.part))
	}
	return string(b)
}

// nearParts are parts a little larger and smaller than those of a recipe.
func nearParts(r recipe) (list recipe) {
	for _, c := range r {
		for _, by := range []int{-2, -1, 1, 2} {
			if part := c.part + by; c.part > 0 && part > 0 && part <= wholeItem {
				list = append(list, choice{c.item, c.how, part})
			}
		}
	}
	return list
}
