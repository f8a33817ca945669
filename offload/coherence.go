package offload

import (
	"cmp"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// stretch is a run of a phase's operations that use the flat buffers of one kind of one unit. It
// ends when another block's buffers are used (as in package fsdp, but for any kind of buffer). For
// a buffer without a unit it is all of its uses. Indices are those of the phase's operations.
type stretch struct {
	unit, slot  int // slot: the chunk, −1 if there are no chunks
	first, last int
	roots       []graph.BufID
	closers     []*graph.Node // after these operations its mirrors are free
}

// coherence runs a copy protocol, like that of a cache, over one phase.
//
// A buffer rests in its home space. A mirror is a copy of it in another space. At the start of a
// stretch only the home holds valid contents. If an operation reads the buffer in another space,
// copies bring the contents there before. If an operation writes it, only the operation's space
// stays valid. At the end of the stretch, contents that are not valid at home and are used later
// are copied home. The mirrors live as long as the stretch:
//
//	home host, used on the device            home device, updated on the host
//
//	copy-in:   fetch u ●                     copy-out:  park g, v ●
//	compute:           ●use u … use u        host:                ●adamw g v m ●
//	copy-out:                       ●park u  copy-in:                          ●fetch v
//	           (only if u was written)
//
// Contents on disk pass through a mirror in host memory, which operations on the host also use.
// A fetch may start at the stretch that is Ahead stretches earlier, after the end of the one before
// that. So at most Ahead+1 stretches of a kind have mirrors. Copies that depend on an operation of
// the stretch itself are placed next to it. If all uses in another space are of the same part of
// the buffer (a rank's own shard), the mirror holds only that part.
type coherence struct {
	r      *rewriter
	w      *weave
	sec    string
	phases []graph.Phase // of the section, before the rewrite
	index  [][][]int     // by phase and root: the operations that use it
	phase  int

	home   []graph.Space // by operation: the space that it runs in
	uses   [][]int       // by root
	byKind [numKinds][]*stretch
	single []*stretch
	turns  map[graph.BufID]int // by root: stretches so far
	closed map[graph.BufID][]closing
	slot   []int // by operation: its chunk
	wrote  map[graph.BufID]bool
}

// closing is the last operation of a stretch that uses some part of a root.
type closing struct {
	part extent
	at   int
}

// collect decides where each operation runs and finds the stretches.
func (c *coherence) collect() {
	r := c.r
	involved := make([]bool, len(r.p.Buffers))
	var kinds [numKinds]bool // of which something is involved
	c.uses, c.turns, c.wrote = c.index[c.phase], map[graph.BufID]int{}, map[graph.BufID]bool{}
	for _, n := range c.w.Base {
		op := &n.Op
		space := graph.Device
		if r.onHost(op) {
			space = graph.Host
			op.Stream = graph.HostWork
		}
		c.home = append(c.home, space)
		effects(op, r.root, func(root graph.BufID, e graph.Effect) {
			if op.Kind != graph.Copy && !involved[root] && r.p.Buf(root).Space != space {
				involved[root] = true
				if m, ours := r.member(root); ours {
					kinds[m.kind] = true
				}
			}
		})
	}
	var using []int // operations that use something involved
	if kinds != [numKinds]bool{} {
		for i, n := range c.w.Base {
			uses := false
			effects(&n.Op, r.root, func(root graph.BufID, _ graph.Effect) { uses = uses || involved[root] })
			if uses {
				using = append(using, i)
			}
		}
	}
	// A unit's buffers of one kind form one stretch. It is enough if one of them is offloaded
	// or used in another space; the others then have nothing to copy.
	for k := range numKinds {
		if !kinds[k] {
			continue
		}
		open := map[[2]int]*stretch{}
		used := map[[2]int][]graph.BufID{}
		for _, i := range using {
			clear(used)
			effects(&c.w.Base[i].Op, r.root, func(root graph.BufID, e graph.Effect) {
				m, ok := r.member(root)
				if key := [2]int{m.unit, c.slot[i]}; ok && m.kind == k && involved[root] && !slices.Contains(used[key], root) {
					used[key] = append(used[key], root)
				}
			})
			if len(used) == 0 {
				continue
			}
			for key := range open {
				if !c.stillUsed(key, used) {
					delete(open, key)
				}
			}
			for u, roots := range used {
				if open[u] == nil {
					open[u] = &stretch{unit: u[0], slot: u[1], first: i, last: i}
					c.byKind[k] = append(c.byKind[k], open[u])
				}
				open[u].last = i
				for _, id := range roots {
					if !slices.Contains(open[u].roots, id) {
						open[u].roots = append(open[u].roots, id)
					}
				}
			}
		}
		slices.SortStableFunc(c.byKind[k], func(a, b *stretch) int {
			return cmp.Or(cmp.Compare(a.first, b.first), cmp.Compare(a.unit, b.unit))
		})
	}
	for id := range r.p.Buffers {
		root := graph.BufID(id)
		if _, ours := r.member(root); involved[root] && !ours {
			list := c.uses[root]
			c.single = append(c.single, &stretch{unit: c.owner(root, list), slot: -1, first: list[0], last: list[len(list)-1], roots: []graph.BufID{root}})
		}
	}
}

// owner returns the unit of the copies of a root that belongs to no moved class. In a pipeline a
// root without a unit gets a unit of the only stage whose operations use it.
func (c *coherence) owner(root graph.BufID, uses []int) int {
	p := c.r.p
	unit := p.Buf(root).Unit
	if unit >= 0 || p.Stages() == 1 {
		return unit
	}
	unit = c.w.Base[uses[0]].Op.Unit
	for _, i := range uses {
		if u := c.w.Base[i].Op.Unit; u < 0 || p.Units[u].Stage != p.Units[unit].Stage {
			return -1
		}
	}
	return unit
}

// stillUsed says whether a stretch of a unit and chunk continues at an operation that uses the
// units and chunks in used. A block has several units if some parameters are frozen, or cut over
// ranks; these do not end each other's stretches. A chunk of a unit ends the stretch of the
// complete unit.
func (c *coherence) stillUsed(key [2]int, used map[[2]int][]graph.BufID) bool {
	if used[key] != nil {
		return true
	}
	for other := range used {
		if key[1] < 0 && (other[1] < 0 || key[0] != other[0]) && c.r.p.SameBlock(key[0], other[0]) {
			return true
		}
	}
	return false
}

func (c *coherence) run() {
	start := c.r.inputsEnd(c.phases[c.phase].Ops) // the inputs do not wait for fetches
	for k := range numKinds {
		list := c.byKind[k]
		for i, reg := range list {
			at, after := start, []*graph.Node(nil)
			if j := i - c.r.o.Ahead; j >= 0 {
				at = list[j].first
			}
			if j := i - c.r.o.Ahead - 1; j >= 0 {
				after = list[j].closers
			}
			for _, root := range reg.roots {
				c.root(reg, root, at, after)
			}
			reg.closers = append(reg.closers, c.w.Base[reg.last])
		}
	}
	for _, reg := range c.single {
		c.root(reg, reg.roots[0], -1, nil)
	}
}

// closedAt returns the last operation of earlier stretches that overlap the part; −1 for none.
func (c *coherence) closedAt(root graph.BufID, part extent) int {
	last := -1
	for _, cl := range c.closed[root] {
		apart := cl.part.stride == part.stride && (cl.part.off+cl.part.size <= part.off || part.off+part.size <= cl.part.off)
		if !apart {
			last = max(last, cl.at)
		}
	}
	return last
}

// atHome says whether an operation that runs in the root's home uses bytes of it outside the
// part.
func (c *coherence) atHome(root graph.BufID, ops []int, part extent) bool {
	more := false
	for _, i := range ops {
		op := &c.w.Base[i].Op
		if op.Kind != graph.Copy && c.home[i] != c.r.p.Buf(root).Space {
			continue
		}
		effects(op, c.r.root, func(id graph.BufID, e graph.Effect) { more = more || id == root && c.r.place(e.Buf) != part })
	}
	return more
}

func (c *coherence) note(root graph.BufID, ops []int, part extent) {
	c.closed[root] = append(c.closed[root], closing{part, ops[len(ops)-1]})
	for _, i := range ops {
		effects(&c.phases[c.phase].Ops[i], c.r.root, func(id graph.BufID, e graph.Effect) {
			if id == root && e.Write {
				c.wrote[root] = true
			}
		})
	}
}

// parts returns, for each other space that is used, the part of the root that its mirror holds.
// parts[home] is the root.
func (c *coherence) parts(root graph.BufID, ops []int, home graph.Space) (parts [graph.NumSpaces]graph.BufID, used [graph.NumSpaces]bool) {
	r := c.r
	one := [graph.NumSpaces]graph.BufID{graph.NoBuf, graph.NoBuf, graph.NoBuf}
	several := [graph.NumSpaces]bool{}
	for _, i := range ops {
		op := &c.w.Base[i].Op
		s := c.home[i]
		if s == home || op.Kind == graph.Copy {
			continue
		}
		effects(op, r.root, func(id graph.BufID, e graph.Effect) {
			if id != root {
				return
			}
			used[s] = true
			if one[s] == graph.NoBuf {
				one[s] = e.Buf
			} else if r.place(one[s]) != r.place(e.Buf) {
				several[s] = true
			}
		})
	}
	for s := range parts {
		parts[s] = root
		if used[s] && !several[s] {
			parts[s] = one[s]
		}
	}
	parts[home] = root
	if home == graph.Disk && used[graph.Device] {
		// Between disk and device the contents pass through the host's mirror.
		switch {
		case !used[graph.Host]:
			parts[graph.Host] = parts[graph.Device]
		case r.place(parts[graph.Host]) != r.place(parts[graph.Device]):
			parts[graph.Host], parts[graph.Device] = root, root
		}
	}
	return parts, used
}

// content says whether the root has contents before its current stretch.
func (c *coherence) content(root graph.BufID) bool {
	if b := c.r.p.Buf(root); b.Life == graph.LifeRun || b.Class == graph.Inputs || c.wrote[root] {
		return true
	}
	if c.r.p.Buf(root).Life == graph.LifePhase {
		return false
	}
	done := c.phase // phases that have run: a repeated phase includes itself
	if c.phases[done].Repeat >= 2 {
		done++
	}
	for j := range done {
		for _, i := range c.index[j][root] {
			found := false
			effects(&c.phases[j].Ops[i], c.r.root, func(id graph.BufID, e graph.Effect) { found = found || id == root && e.Write })
			if found {
				return true
			}
		}
	}
	return false
}

// wanted says whether the contents of the root are used after operation i.
func (c *coherence) wanted(root graph.BufID, i int) bool {
	b := c.r.p.Buf(root)
	if b.Life == graph.LifeRun {
		return true
	}
	list := c.uses[root]
	if list[len(list)-1] > i {
		return true
	}
	if b.Life == graph.LifePhase {
		return false
	}
	next := c.phase // phases that will run: a repeated phase includes itself
	if c.phases[next].Repeat < 2 {
		next++
	}
	return slices.ContainsFunc(c.index[next:], func(uses [][]int) bool { return len(uses[root]) > 0 })
}

// replaces says whether the operations overwrite every byte of the root that the section ever uses
// before they read it. A write that may be skipped keeps the old contents, so it counts as a read.
func (c *coherence) replaces(root graph.BufID, ops []int) bool {
	r := c.r
	var written spans
	ok := true
	for _, i := range ops {
		op := &c.w.Base[i].Op
		effects(op, r.root, func(id graph.BufID, e graph.Effect) {
			if id == root && (e.Read || e.Write && !e.Fresh) {
				_, lo, hi := graph.Span(r.p, e.Buf)
				ok = ok && written.covers(lo, hi)
			}
		})
		if !ok {
			return false
		}
		effects(op, r.root, func(id graph.BufID, e graph.Effect) {
			if x := r.place(e.Buf); id == root && e.Fresh && x.stride == 0 {
				written.add(x.off, x.off+x.size)
			}
		})
	}
	for j := range c.phases {
		for _, k := range c.index[j][root] {
			effects(&c.phases[j].Ops[k], r.root, func(id graph.BufID, e graph.Effect) {
				if id == root && r.p.Buf(e.Buf).View != nil {
					_, lo, hi := graph.Span(r.p, e.Buf)
					ok = ok && written.covers(lo, hi)
				}
			})
			if !ok {
				return false
			}
		}
	}
	return true
}

// redirect replaces the root by its mirror in an operation's operands.
func (c *coherence) redirect(op *graph.Op, root, mirror, part graph.BufID) {
	move := func(id graph.BufID) graph.BufID {
		if id == graph.NoBuf || c.r.root(id) != root {
			return id
		}
		return c.r.in(id, mirror, part)
	}
	for a, id := range op.In {
		op.In[a] = move(id)
	}
	for a, o := range op.Out {
		op.Out[a].Buf = move(o.Buf)
	}
	op.Skip = move(op.Skip)
}

// spans is a set of bytes, as sorted ranges.
type spans [][2]int64

func (s *spans) add(lo, hi int64) {
	var out spans
	for _, x := range *s {
		if x[1] < lo || hi < x[0] {
			out = append(out, x)
			continue
		}
		lo, hi = min(lo, x[0]), max(hi, x[1])
	}
	*s = append(out, [2]int64{lo, hi})
}

func (s spans) covers(lo, hi int64) bool {
	return slices.ContainsFunc(s, func(x [2]int64) bool { return x[0] <= lo && hi <= x[1] })
}
