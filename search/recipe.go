package search

import (
	"cmp"
	"math"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// item is one kind of activation or one class of units' states, with the indices of its moves; −1:
// no such move.
type item struct {
	name             string
	drop, host, disk int
	class            graph.Class
	state            bool    // it is a class of states
	bytes            float64 // of device memory
}

// items returns all kinds of activations, the most expensive to recompute first, and then the
// classes, those that a step reads most often first. Host memory goes to them in this order.
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

// dropRatio returns the seconds that recomputing an item costs per byte; +Inf if it cannot be
// recomputed.
func (set *moveSet) dropRatio(it item) float64 {
	if it.drop < 0 {
		return math.Inf(1)
	}
	return set.moves[it.drop].seconds / set.moves[it.drop].bytes
}

// stepsOf returns the number of parts in which an item can be moved: layers, or percent of a class.
func (it *item) stepsOf(set *moveSet, layers int) int {
	if it.state {
		return 100
	}
	return set.moves[max(it.drop, it.host, it.disk)].layers(layers)
}

// way is the treatment of an item that does not stay on the device.
type way int

const (
	again  way = iota // recomputed
	away              // to the host, or to disk if the host has no room
	toDisk            // to disk
)

// wholeItem is the part of a choice that is its complete item: parts are in sixteenths.
const wholeItem = 16

// choice is an item, by its index, and its treatment. The given part leaves the device even if the
// cap does not require it: the update on the host runs beside the device's work, so a step may be
// faster. Part 0: as much leaves as the cap requires.
type choice struct {
	item int
	how  way
	part int
}

// recipe lists the choices in the order in which they leave the device: first the parts, then as
// much as the cap requires.
type recipe []choice

// wholly returns the recipe with all of its items leaving completely.
func (r recipe) wholly() recipe {
	r = slices.Clone(r)
	for i := range r {
		r[i].part = wholeItem
	}
	return r
}

// key returns a text that identifies a recipe: there are fewer than 65,536 items, and a part is at
// most wholeItem.
func (r recipe) key() string {
	b := make([]byte, 0, 4*len(r))
	for _, c := range r {
		b = append(b, byte(c.item), byte(c.item>>8), byte(c.how), byte(c.part))
	}
	return string(b)
}

// nearParts returns choices with parts slightly larger and smaller than those of a recipe.
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
