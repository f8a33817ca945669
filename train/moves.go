package train

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/recompute"
)

// moveKind is what a search does to a group of buffers.
type moveKind int

const (
	dropMove  moveKind = iota // computed again in the backward
	parkMove                  // on the host or disk from the forward to the backward
	placeMove                 // a class of the units' buffers rests off the device
)

// move takes device memory away from one kind of buffer in all layers, or from a
// class of all units, for time. A share of it is its first layers, or units.
type move struct {
	kind          moveKind
	before, after string // the buffers' names around the layer's number
	also          string // "", or the end of the names of others that go with them
	first, last   int    // layers that have them; last −1: the model's last
	class         graph.Class
	space         graph.Space
	bytes         float64 // of device memory, estimated
	seconds       float64 // a step, estimated
}

// moveSet is what one kind of micro-batch offers.
type moveSet struct {
	moves                []move
	recompute, offload   string
	canDrop, canOffload  bool
	dropCount, parkCount int
}

// mix is how much of each move of a set is made, each from 0 to 1.
type mix []float64

// smallestMove is the least part of the largest kind of activation that is a
// choice of its own.
const smallestMove = 1.0 / 32

// newMoveSet finds the moves of a configuration with the model's own number of
// layers. spaces are the tiers that activations and classes may go to.
func newMoveSet(cfg Config, layers int, drop bool, spaces []graph.Space, m *cost.Machine) (*moveSet, error) {
	set := &moveSet{recompute: cfg.Recompute, offload: cfg.Offload, canDrop: drop, canOffload: len(spaces) > 0}
	if drop {
		set.recompute = "none"
	}
	few := cfg
	few.layers = min(layers, 3) // they are alike
	if len(cfg.Freeze) > 0 {
		few.layers = layers
	}
	few.Recompute = set.recompute
	fwd, conf, _, err := passesOf(&few)
	if err != nil {
		return nil, err
	}
	p, list, err := cfg.plans().Candidates(fwd, conf)
	if err != nil {
		return nil, err
	}
	groups := groupsOf(p, list, m, cfg.Accum)
	largest := 0.0
	for i := range groups {
		g := &groups[i]
		if cfg.inLayers() {
			g.bytes *= float64(cfg.Accum) // the micro-batches' are there at once
		}
		if len(cfg.Freeze) == 0 {
			g.first, g.last = 0, layers-1
		}
		n := float64(g.last - g.first + 1)
		g.bytes *= n
		if g.seconds > 0 {
			g.seconds *= n
		}
		if len(cfg.Freeze) == 0 {
			g.last = -1
		}
		largest = max(largest, g.bytes)
	}
	groups = slices.DeleteFunc(groups, func(g group) bool { return g.bytes == 0 || g.bytes < smallestMove*largest })
	if drop {
		for _, g := range groups {
			if g.seconds >= 0 {
				set.moves = append(set.moves, move{kind: dropMove, before: g.before, after: g.after, also: g.also, first: g.first, last: g.last, bytes: g.bytes, seconds: g.seconds})
				set.dropCount++
			}
		}
	}
	for _, space := range spaces {
		for _, g := range groups {
			set.moves = append(set.moves, move{kind: parkMove, before: g.before, after: g.after, also: g.also, first: g.first, last: g.last, space: space, bytes: g.bytes})
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
	seconds             float64 // to make one layer's again, a step; −1: cannot be dropped
	act                 graph.BufID
}

// groupsOf puts the candidates of a program together by kind.
func groupsOf(p *graph.Program, list []recompute.Candidate, m *cost.Machine, accum int) (groups []group) {
	buffer := map[graph.BufID]int{} // group of the first layer's
	for _, c := range list {
		block := p.BlockOf(c.Unit)
		before, after, ok := block.Cut(c.Name)
		if !ok {
			continue // of a block that stands alone
		}
		layer := block.Index
		at := slices.IndexFunc(groups, func(g group) bool { return g.before == before && g.after == after })
		if at >= 0 {
			groups[at].last = layer
			continue
		}
		g := group{before: before, after: after, first: layer, last: layer, bytes: float64(c.Bytes), seconds: -1, act: graph.NoBuf}
		if n := len(c.Ops); n > 0 && c.Ops[n-1].Kind == graph.Linear && len(c.Ops[n-1].Out) > 1 && c.Ops[n-1].Out[1].Buf == c.Buf {
			g.act = c.Ops[n-1].Out[0].Buf // a pre-activation: the product makes both again
		}
		buffer[c.Buf] = len(groups)
		if len(c.Ops) > 0 {
			g.seconds = 0
			for i := range c.Ops {
				g.seconds += busy(m, m.Op(p, &c.Ops[i])) * float64(accum)
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
				act.also, act.bytes, act.seconds = pre.after, act.bytes+pre.bytes, pre.seconds
				pre.bytes = 0
			} else {
				pre.seconds -= act.seconds
			}
		}
	}
	return groups
}

// find returns the index of a move; −1: there is none.
func (set *moveSet) find(kind moveKind, after string, class graph.Class, space graph.Space) int {
	return slices.IndexFunc(set.moves, func(m move) bool {
		return m.kind == kind && m.after == after && m.class == class && m.space == space
	})
}

// layers are those that have the move's buffers in a model of n layers.
func (m *move) layers(n int) int {
	if m.last < 0 {
		return n - m.first
	}
	return m.last - m.first + 1
}

// layersOf is how many of n layers a share is.
func layersOf(share float64, n int) int { return min(n, int(math.Ceil(share*float64(n)-1e-9))) }

// percentOf is a share in whole percent.
func percentOf(share float64) int { return int(math.Ceil(share*100 - 1e-9)) }

// texts writes a mix as the values of --recompute and --offload for a model of n
// layers.
func (set *moveSet) texts(x mix, n int) (recompute, offload string) {
	recompute, offload = set.recompute, set.offload
	patterns := func(i int) (list []string) {
		m := &set.moves[i]
		for _, end := range []string{m.after, m.also} {
			if end != "" {
				list = append(list, fmt.Sprintf("%s{%d-%d}%s", m.before, m.first, m.first+layersOf(x[i], m.layers(n))-1, end))
			}
		}
		return list
	}
	var drops []string
	wholes := 0
	gone := map[string]bool{} // activations that leave in all layers
	for i, m := range set.moves {
		if m.kind == dropMove && x[i] > 0 {
			drops = append(drops, patterns(i)...)
			if k := m.layers(n); layersOf(x[i], k) == k {
				wholes++
				gone[m.after] = true
			}
		}
	}
	switch {
	case len(drops) == 0:
	case wholes == set.dropCount:
		recompute = "full"
	default:
		recompute = "drop:" + strings.Join(drops, ",")
	}
	if !set.canOffload {
		return recompute, offload
	}
	var parts []string
	for _, class := range []graph.Class{graph.Optimizer, graph.Parameters, graph.Gradients} {
		var tiers []string
		total := 0.0
		for i, m := range set.moves {
			if m.kind == placeMove && m.class == class {
				total += x[i]
			}
		}
		for i, m := range set.moves {
			if m.kind != placeMove || m.class != class || x[i] <= 0 {
				continue
			}
			tier := m.space.String()
			if rest := total >= 1 && !slices.ContainsFunc(set.moves[i+1:], func(o move) bool {
				return o.kind == placeMove && o.class == class && x[set.find(placeMove, "", class, o.space)] > 0
			}); !rest {
				tier += fmt.Sprintf(":%d%%", percentOf(x[i]))
			}
			tiers = append(tiers, tier)
		}
		if len(tiers) > 0 {
			parts = append(parts, class.String()+"="+strings.Join(tiers, "+"))
		}
	}
	var tiers []string
	all := map[graph.Space]int{}
	for _, space := range []graph.Space{graph.Host, graph.Disk} {
		var names []string
		kinds := 0
		for i, m := range set.moves {
			if m.kind == parkMove && m.space == space && x[i] > 0 {
				names = append(names, patterns(i)...)
				kinds++
				if k := m.layers(n); layersOf(x[i], k) == k {
					all[space]++
				}
			}
		}
		if len(names) > 0 {
			tiers = append(tiers, space.String()+":"+strings.Join(names, ";"))
			if all[space] == kinds && all[space]+len(gone) == set.parkCount {
				tiers[len(tiers)-1] = space.String()
			}
		}
	}
	if len(tiers) > 0 {
		parts = append(parts, "activations="+strings.Join(tiers, "+"))
	}
	return recompute, strings.Join(parts, ",")
}

// rung is a step of a ladder: a share of a move.
type rung struct {
	move  int
	share float64
}

// tiering is how a ladder uses the tiers.
type tiering int

const (
	onDevice     tiering = iota // drops alone
	hostTier                    // what leaves goes to the host
	hostThenDisk                // to disk once the host is full
	diskTier
	anyTier    // none is needed
	presetTier // whole classes, as given
)

// tierings are those that a set of moves offers.
func (set *moveSet) tierings() []tiering {
	has := func(s graph.Space) bool {
		return slices.ContainsFunc(set.moves, func(m move) bool { return m.kind == placeMove && m.space == s })
	}
	list := []tiering{onDevice}
	if has(graph.Host) {
		list = append(list, hostTier)
	}
	if has(graph.Disk) {
		if has(graph.Host) {
			list = append(list, hostThenDisk)
		}
		list = append(list, diskTier)
	}
	return list
}

// busy is what an operation adds to the step: where the ranks share cores, all
// of them run it.
func busy(m *cost.Machine, w cost.Work) float64 {
	if m.Cores == 0 {
		return w.Alone
	}
	return max(w.Alone, w.Core*float64(max(m.Sharers, 1))/float64(m.Cores))
}

// linkTo returns the seconds that the link to a space takes for a byte of each pass of
// a step, and the bytes that it moves beside a pass of the forward, which takes so many
// seconds a step.
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

// activation is one kind of activation, with the moves that there are for it; −1: none.
type activation struct {
	drop, park int
	bytes      float64
	ratio      float64 // seconds a byte of the drop; +Inf: none
}

// activations are all kinds, what is dearest to compute again first.
func (set *moveSet) activations(space graph.Space, t tiering) (acts []activation) {
	index := map[string]int{}
	at := func(mv *move) *activation {
		key := mv.before + "\x00" + mv.after
		if _, ok := index[key]; !ok {
			index[key] = len(acts)
			acts = append(acts, activation{-1, -1, mv.bytes, math.Inf(1)})
		}
		return &acts[index[key]]
	}
	for i := range set.moves {
		mv := &set.moves[i]
		switch {
		case mv.kind == dropMove:
			a := at(mv)
			a.drop, a.ratio = i, mv.seconds/mv.bytes
		case mv.kind == parkMove && t != onDevice && mv.space == space:
			at(mv).park = i
		}
	}
	slices.SortStableFunc(acts, func(a, b activation) int { return cmp.Compare(b.ratio, a.ratio) })
	return acts
}

// ladder orders moves by seconds lost for a byte saved, the cheapest first:
//
//	park      costs nothing as long as the link has time for it beside the forward,
//	          and the time of the link after that
//	drop      the time of the operations that make the buffer again
//	place     what the simulator found for the whole class
//
// The time of the link is spent on what is dearest to compute again. Of each kind
// of activation there is at most one rung. A step has so many passes (base.passes). hostFree is what is left of the host's
// cap, in bytes.
func (set *moveSet) ladder(m *cost.Machine, forward float64, passes int, t tiering, hostFree float64) []rung {
	space := graph.Host
	if t == diskTier {
		space = graph.Disk
	}
	type entry struct {
		rung
		ratio float64
	}
	var list []entry
	link, slack := linkTo(m, space, forward, passes)
	acts := set.activations(space, t)
	// Host memory goes to what is dearest to compute again, then to the classes;
	// what finds none left goes to disk where there is one, or is dropped.
	capped := t == hostTier || t == hostThenDisk
	leave := func(i int) (int, bool) {
		if !capped {
			return i, true
		}
		mv := &set.moves[i]
		if mv.bytes <= hostFree {
			hostFree -= mv.bytes
			return i, true
		}
		return set.find(mv.kind, mv.after, mv.class, graph.Disk), t == hostThenDisk
	}
	for _, a := range acts {
		free := a.bytes <= slack
		if a.park >= 0 && (free || a.drop < 0 || a.ratio > link) {
			if i, ok := leave(a.park); ok {
				ratio := link
				if free {
					slack -= a.bytes
					ratio = 0
				}
				list = append(list, entry{rung{i, 1}, ratio})
				continue
			}
		}
		if a.drop >= 0 {
			list = append(list, entry{rung{a.drop, 1}, a.ratio})
		}
	}
	for i := range set.moves {
		mv := &set.moves[i]
		if mv.kind == placeMove && t != onDevice && mv.space == space && mv.bytes > 0 {
			if i, ok := leave(i); ok {
				list = append(list, entry{rung{i, 1}, max(0, mv.seconds) / mv.bytes})
			}
		}
	}
	slices.SortStableFunc(list, func(a, b entry) int { return cmp.Compare(a.ratio, b.ratio) })
	rungs := make([]rung, len(list))
	for i, e := range list {
		rungs[i] = e.rung
	}
	return rungs
}
