package search

import (
	"fmt"
	"math"
	"slices"
	"strconv"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/recompute"
)

// moveKind is a way to free the device memory of a group of buffers.
type moveKind int

const (
	dropMove  moveKind = iota // recomputed in the backward
	parkMove                  // on the host or disk from the forward to the backward
	placeMove                 // a class of the units' buffers rests off the device
)

// move frees device memory of one kind of buffer in all layers, or of a class of all units, at the
// cost of time. A share of it applies to its first layers, or units.
type move struct {
	kind          moveKind
	before, after string // the buffers' names around the layer's number
	also          string // "", or the end of the names of others that go with them
	alone         bool   // one buffer, of a block that stands alone; its name is before
	first, last   int    // layers that have them; last −1: the model's last
	class         graph.Class
	space         graph.Space
	bytes         float64 // of device memory, estimated
	takes         float64 // bytes needed in space, estimated
	seconds       float64 // per step, estimated
}

// moveSet lists the moves that are possible for one size of micro-batch.
type moveSet struct {
	moves                []move
	recompute            recompute.Options
	offload              offload.Options
	canDrop, canOffload  bool
	dropCount, parkCount int
}

// mix is the share of each move of a set that is made, each from 0 to 1.
type mix []float64

// smallestMove is the smallest size of an activation kind that is a separate choice, relative to
// the largest kind.
const smallestMove = 1.0 / 32

// newMoveSet finds the moves of a configuration with the model's own number of
// layers. spaces are the tiers that activations and classes may go to.
func newMoveSet(s Spec, drop bool, spaces []graph.Space, m *cost.Machine) (*moveSet, error) {
	set := &moveSet{recompute: s.Recompute, offload: s.Offload, canDrop: drop, canOffload: len(spaces) > 0}
	if drop {
		set.recompute, s.Recompute, s.Auto = recompute.Options{}, recompute.Options{}, false
	}
	layers := s.Layers
	few := min(layers, 3) // they are alike
	if s.Frozen {
		few = layers
	}
	at, err := s.passes(few)
	if err != nil {
		return nil, err
	}
	p, list, err := s.Plans.Candidates(at.Forward, at.Config)
	if err != nil {
		return nil, err
	}
	groups := groupsOf(p, list, m, s.Accum)
	largest := 0.0
	for i := range groups {
		g := &groups[i]
		if s.inLayers() {
			g.bytes *= float64(s.Accum) // those of all micro-batches are live at once
		}
		if g.alone {
			largest = max(largest, g.bytes)
			continue
		}
		if !s.Frozen {
			g.first, g.last = 0, layers-1
		}
		n := float64(g.last - g.first + 1)
		g.bytes *= n
		if g.seconds > 0 {
			g.seconds *= n
		}
		if !s.Frozen {
			g.last = -1
		}
		largest = max(largest, g.bytes)
	}
	groups = slices.DeleteFunc(groups, func(g group) bool { return g.bytes == 0 || g.bytes < smallestMove*largest })
	if drop {
		for _, g := range groups {
			if g.seconds >= 0 {
				set.moves = append(set.moves, move{kind: dropMove, before: g.before, after: g.after, also: g.also, alone: g.alone, first: g.first, last: g.last, bytes: g.bytes, seconds: g.seconds})
				set.dropCount++
			}
		}
	}
	for _, space := range spaces {
		for _, g := range groups {
			set.moves = append(set.moves, move{kind: parkMove, before: g.before, after: g.after, also: g.also, alone: g.alone, first: g.first, last: g.last, space: space, bytes: g.bytes, takes: g.bytes})
		}
		for _, class := range []graph.Class{graph.Optimizer, graph.Parameters, graph.Gradients} {
			set.moves = append(set.moves, move{kind: placeMove, class: class, space: space})
		}
	}
	if len(spaces) > 0 {
		set.parkCount = len(groups)
	}
	return set, nil
}

// group is one kind of activation in all layers that have it.
type group struct {
	before, after, also string
	first, last         int
	bytes               float64 // of one layer
	seconds             float64 // per step to recompute one layer's; −1: cannot be dropped
	act                 graph.BufID
	alone               bool // one buffer, of a block that stands alone
}

// groupsOf puts the candidates of a program together by kind. Those of blocks that stand alone are
// left out unless they have most of the bytes: beside many layers they are not worth a choice.
func groupsOf(p *graph.Program, list []recompute.Candidate, m *cost.Machine, accum int) (groups []group) {
	buffer := map[graph.BufID]int{} // group of the first layer's
	var alone, repeated int64
	for _, c := range list {
		if _, _, ok := p.BlockOf(c.Unit).Cut(c.Name); ok {
			repeated += c.Bytes
		} else {
			alone += c.Bytes
		}
	}
	for _, c := range list {
		block := p.BlockOf(c.Unit)
		before, after, ok := block.Cut(c.Name)
		layer := block.Index
		if !ok {
			if alone <= repeated {
				continue
			}
			before, after, layer = c.Name, "", 0
		}
		at := slices.IndexFunc(groups, func(g group) bool { return g.before == before && g.after == after })
		if at >= 0 {
			groups[at].last = layer
			continue
		}
		g := group{before: before, after: after, first: layer, last: layer, alone: !ok, bytes: float64(c.Bytes), seconds: -1, act: graph.NoBuf}
		if n := len(c.Ops); n > 0 && (c.Ops[n-1].Kind == graph.Linear || c.Ops[n-1].Kind == graph.LinearAct) && len(c.Ops[n-1].Out) > 1 && c.Ops[n-1].Out[1].Buf == c.Buf {
			g.act = c.Ops[n-1].Out[0].Buf // a pre-activation: the product makes both again
		}
		buffer[c.Buf] = len(groups)
		if len(c.Ops) > 0 {
			g.seconds = 0
			for i := range c.Ops {
				g.seconds += float64(busy(m, m.Op(p, &c.Ops[i])) * float64(accum))
			}
		}
		groups = append(groups, g)
	}
	// A product that makes a pre-activation again makes the activation too: where
	// both together save more for a second than the activation alone, they go
	// together; otherwise the second costs what the first has not paid.
	for i := range groups {
		pre := &groups[i]
		k, ok := buffer[pre.act]
		if act := &groups[k]; pre.act != graph.NoBuf && ok && act.seconds >= 0 {
			if pre.seconds/(pre.bytes+act.bytes) <= act.seconds/act.bytes {
				act.also, act.bytes, act.seconds = pre.ending(), act.bytes+pre.bytes, pre.seconds
				pre.bytes = 0
			} else {
				pre.seconds -= act.seconds
			}
		}
	}
	return groups
}

// ending returns the text that distinguishes a group's buffers from others of their layer: the end
// of their names, or the name of one that is alone.
func (g *group) ending() string {
	if g.alone {
		return g.before
	}
	return g.after
}

// patterns returns patterns for the names of the first n layers' buffers.
func (m *move) patterns(n int) (list []string) {
	if m.alone {
		list = append(list, m.before)
	} else {
		list = append(list, m.before+layersText(m.first, m.first+n-1)+m.after)
	}
	switch {
	case m.also == "":
	case m.alone:
		list = append(list, m.also)
	default:
		list = append(list, m.before+layersText(m.first, m.first+n-1)+m.also)
	}
	return list
}

// layersText formats the layers in a pattern: one by its number, several as {0-3}.
func layersText(from, to int) string {
	if from == to {
		return strconv.Itoa(from)
	}
	return fmt.Sprintf("{%d-%d}", from, to)
}

// layers returns the number of layers that have the move's buffers, in a model of n layers.
func (m *move) layers(n int) int {
	if m.alone {
		return 1
	}
	if m.last < 0 {
		return n - m.first
	}
	return m.last - m.first + 1
}

// layersOf returns the number of layers in a share of n layers, rounded up.
func layersOf(share float64, n int) int {
	return min(n, int(math.Ceil(float64(share*float64(n))-1e-9)))
}

// percentOf returns a share in whole percent, rounded up.
func percentOf(share float64) int { return int(math.Ceil(float64(share*100) - 1e-9)) }

// options returns the options of a mix for a model of n layers.
func (set *moveSet) options(x mix, n int) (again recompute.Options, away offload.Options) {
	again, away = set.recompute, set.offload
	var drops []string
	wholes := 0
	gone := 0 // activations that are dropped in all layers
	for i := range set.moves {
		m := &set.moves[i]
		if m.kind != dropMove || x[i] <= 0 {
			continue
		}
		k := layersOf(x[i], m.layers(n))
		drops = append(drops, m.patterns(k)...)
		if k == m.layers(n) {
			wholes++
			gone++
		}
	}
	switch {
	case len(drops) == 0:
	case wholes == set.dropCount:
		again = policyOf(recompute.Full)
	default:
		again = recompute.Options{Drop: drops}
	}
	if !set.canOffload {
		return again, away
	}
	away = offload.Options{}
	for _, class := range []graph.Class{graph.Optimizer, graph.Parameters, graph.Gradients} {
		away = away.With(set.shares(x, class))
	}
	return again, away.With(set.parked(x, n, gone))
}

// shares returns the parts of a class of units' buffers that leave the device.
func (set *moveSet) shares(x mix, class graph.Class) (parts []offload.Part) {
	var mine []int
	total := 0.0
	for i, m := range set.moves {
		if m.kind == placeMove && m.class == class && x[i] > 0 {
			mine = append(mine, i)
			total += x[i]
		}
	}
	for k, i := range mine {
		p := offload.Part{Class: class, Space: set.moves[i].space, Share: float64(percentOf(x[i])) / 100}
		if total >= 1 && k == len(mine)-1 {
			p.Share = 0 // the rest
		}
		parts = append(parts, p)
	}
	return parts
}

// parked returns the activations that wait off the device. gone is the number of kinds that are
// dropped in all layers.
func (set *moveSet) parked(x mix, n, gone int) (parts []offload.Part) {
	for _, space := range []graph.Space{graph.Host, graph.Disk} {
		var names []string
		kinds, wholes := 0, 0
		for i := range set.moves {
			m := &set.moves[i]
			if m.kind != parkMove || m.space != space || x[i] <= 0 {
				continue
			}
			k := layersOf(x[i], m.layers(n))
			names = append(names, m.patterns(k)...)
			kinds++
			if k == m.layers(n) {
				wholes++
			}
		}
		switch {
		case kinds == 0:
		case wholes == kinds && wholes+gone == set.parkCount:
			parts = append(parts, offload.Part{Class: graph.Activations, Space: space})
		default:
			parts = append(parts, offload.Part{Class: graph.Activations, Space: space, Buffers: names})
		}
	}
	return parts
}

// busy returns the seconds that an operation adds to a step. If ranks share cores, all of them run
// it.
func busy(m *cost.Machine, w cost.Work) float64 {
	if m.Cores == 0 {
		return w.Alone
	}
	return max(w.Alone, w.Core*float64(max(m.Sharers, 1))/float64(m.Cores))
}

// Mixed returns the options that drop and park parts of the activations. share gives the part of
// each kind, by the end of its buffers' names, that is recomputed and that waits in each of spaces:
// from 0, none, to 1, that of all layers.
func Mixed(s Spec, spaces []graph.Space, m *cost.Machine, share func(kind string) float64) (recompute.Options, offload.Options, error) {
	if s.Plans == nil {
		s.Plans = &plan.Shared{}
	}
	set, err := newMoveSet(s, true, spaces, m)
	if err != nil {
		return recompute.Options{}, offload.Options{}, err
	}
	x := make(mix, len(set.moves))
	for i, mv := range set.moves {
		if mv.kind != placeMove {
			x[i] = share(mv.after)
		}
	}
	again, away := set.options(x, s.Layers)
	return again, away, nil
}

// linkTo returns the link's seconds per byte over all passes of a step to a space. On a GPU it also
// returns the bytes that the link moves during the forward of one pass. forward is the seconds of a
// step's forwards.
func linkTo(m *cost.Machine, space graph.Space, forward float64, passes int) (link, slack float64) {
	perByte := func(out, in float64) float64 {
		if out <= 0 || in <= 0 {
			return 2 / m.Memory
		}
		if m.Cores > 0 {
			return 1/out + 1/in
		}
		return 1 / out
	}
	link, rate := perByte(m.ToHost, m.ToDevice), m.ToHost
	if space == graph.Disk {
		link, rate = perByte(m.DiskWrite, m.DiskRead), m.DiskWrite
	}
	if m.Cores == 0 && rate > 0 {
		slack = forward / float64(passes) * rate
	}
	return link * float64(passes), slack
}

// policyOf returns options with one policy for all units.
func policyOf(p recompute.Policy) recompute.Options {
	return recompute.Options{Rules: []recompute.Rule{{Policy: p, Unit: "*"}}}
}

// isFull reports whether everything is recomputed.
func isFull(o recompute.Options) bool {
	return len(o.Drop) == 0 && len(o.Rules) == 1 && o.Rules[0] == recompute.Rule{Policy: recompute.Full, Unit: "*"}
}

// resting returns the options that place complete classes in a space.
func resting(classes []graph.Class, space graph.Space) (o offload.Options) {
	for _, c := range classes {
		switch c {
		case graph.Optimizer:
			o.Optimizer = space
		case graph.Parameters:
			o.Parameters = space
		case graph.Gradients:
			o.Gradients = space
		default:
			o.Activations = space
		}
	}
	return o
}
