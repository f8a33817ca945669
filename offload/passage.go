package offload

import (
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// passage runs the copy protocol (see coherence) for one root buffer in one stretch. It tracks, for
// each operation, the spaces in which the contents are valid.
type passage struct {
	c    *coherence
	reg  *stretch
	root graph.BufID
	home graph.Space
	ops  []int // operations of the stretch that use the root

	parts [graph.NumSpaces]graph.BufID // by space: the part of the root that it holds
	used  [graph.NumSpaces]bool        // spaces other than home in which operations use it
	span  extent                       // the bytes of the root that the stretch copies
	turn  int                          // the stretch's number among those of the root
	held  [graph.NumSpaces]graph.BufID // by space: the buffer that holds the part; NoBuf: not known yet

	at    int           // index before which fetches may be placed; −1: directly before the operation that needs them
	after []*graph.Node // nodes that fetches must wait for
	pass  graph.Pass

	fresh   bool // the old contents are not needed
	valid   [graph.NumSpaces]bool
	touched bool // an operation of the stretch has written the root
	last    int  // index of the last operation that wrote it
}

// root runs the protocol for one root buffer in one stretch. at is the index before which its
// fetches may be placed (−1: directly before the operation that needs them). They wait for the
// nodes in after.
func (c *coherence) root(reg *stretch, root graph.BufID, at int, after []*graph.Node) {
	r := c.r
	uses := c.uses[root]
	from, _ := slices.BinarySearch(uses, reg.first)
	to, _ := slices.BinarySearch(uses, reg.last+1)
	g := &passage{c: c, reg: reg, root: root, home: r.p.Buf(root).Space, ops: uses[from:to],
		at: at, after: after, last: -1, held: [graph.NumSpaces]graph.BufID{graph.NoBuf, graph.NoBuf, graph.NoBuf}}
	g.parts, g.used = c.parts(root, g.ops, g.home)
	if g.used == [graph.NumSpaces]bool{} {
		c.note(root, g.ops, r.place(root))
		return
	}
	g.chooseSpan()
	g.turn = c.turns[root]
	c.turns[root]++
	g.fresh = !c.content(root) || c.replaces(root, g.ops)
	g.valid[g.home] = true
	g.pass = c.w.Base[g.ops[0]].Op.Pass
	for _, i := range g.ops {
		g.operation(i)
	}
	if g.touched && !g.valid[g.home] && c.wanted(root, g.ops[len(g.ops)-1]) {
		nodes := g.bring(g.home, func(op graph.Op) *graph.Node { return c.w.After(g.last, op) })
		reg.closers = append(reg.closers, nodes[len(nodes)-1])
	}
	c.note(root, g.ops, g.span)
}

// chooseSpan sets span: the part that the mirror holds if only one other space is used, and
// otherwise the complete root.
func (g *passage) chooseSpan() {
	r := g.c.r
	whole := r.place(g.root)
	g.span = whole
	for s, yes := range g.used {
		if yes && r.place(g.parts[s]) != whole {
			g.span = r.place(g.parts[s])
		}
	}
	for s, yes := range g.used {
		if yes && r.place(g.parts[s]) == whole || g.c.atHome(g.root, g.ops, g.span) {
			g.span = whole
		}
	}
}

// where returns the buffer that holds the root's part in a space.
func (g *passage) where(s graph.Space) graph.BufID {
	if s == g.home {
		return g.parts[g.home]
	}
	if g.held[s] == graph.NoBuf {
		g.held[s] = g.c.r.mirror(mirrorKey{g.root, s, g.c.sec, g.turn, g.parts[s]})
	}
	return g.held[s]
}

// operation runs the protocol for one operation: if it reads, the contents are brought to its
// space; if it writes, they are then valid only there.
func (g *passage) operation(i int) {
	op := &g.c.w.Base[i].Op
	s := g.c.home[i]
	if op.Kind == graph.Copy {
		s = g.home
	}
	reads, writes := g.effect(op, s)
	if !g.valid[s] {
		g.enter(i, s, reads)
	}
	if writes {
		g.valid = [graph.NumSpaces]bool{}
		g.valid[s] = true
		g.touched, g.last = true, i
	}
	if s != g.home {
		g.c.redirect(op, g.root, g.where(s), g.parts[s])
	}
}

// effect says whether an operation in space s reads and writes the root's contents. A write of a
// part also reads if the rest of the contents is needed.
func (g *passage) effect(op *graph.Op, s graph.Space) (reads, writes bool) {
	r := g.c.r
	effects(op, r.root, func(id graph.BufID, e graph.Effect) {
		if id != g.root {
			return
		}
		whole := e.Fresh && (s != g.home && r.place(e.Buf) == r.place(g.parts[s]) || r.place(e.Buf).size == r.p.Buf(g.root).Bytes())
		reads = reads || e.Read || !g.fresh && !whole && e.Write
		writes = writes || e.Write
	})
	return reads, writes
}

// enter makes space s valid for operation i. It adds a fetch before the operation, or uses the
// operation's own write, which must wait as a fetch would.
func (g *passage) enter(i int, s graph.Space, reads bool) {
	w := g.c.w
	first, waits := w.Base[i], true
	if reads && (!g.fresh || g.touched) {
		pos := i
		if g.at >= 0 && !g.touched {
			pos = min(i, max(g.at, g.c.closedAt(g.root, g.span)+1))
		}
		// The copies are on one stream, so it is enough to delay the first.
		nodes := g.bring(s, func(op graph.Op) *graph.Node { return w.Before(pos, op) })
		first, waits = nodes[0], !g.touched
	}
	for _, b := range g.after {
		if waits {
			w.Throttle(b, first)
		}
	}
	g.valid[s] = true
}

// bring copies the contents to space s, from the nearest space in which they are valid.
func (g *passage) bring(s graph.Space, insert func(graph.Op) *graph.Node) (nodes []*graph.Node) {
	from := g.home
	for x := range graph.NumSpaces {
		if g.valid[x] && (!g.valid[from] || distance(x, s) < distance(from, s)) {
			from = x
		}
	}
	if g.home == graph.Disk && !g.used[graph.Host] && from != s && from != graph.Host && s != graph.Host {
		return g.bounce(s, insert)
	}
	for from != s {
		next := from + 1
		if s < from {
			next = from - 1
		}
		src, dst := g.ends(from, next)
		nodes = append(nodes, insert(g.c.w.transfer(g.c.r.p, g.c.r.p.Buf(g.root).Name, src, dst, g.pass, g.reg.unit)))
		g.valid[next] = true
		from = next
	}
	return nodes
}

// distance returns the number of copies between neighbouring spaces on the way from a to b.
func distance(a, b graph.Space) graph.Space { return max(a, b) - min(a, b) }

// ends returns the source and destination of a copy between two neighbouring spaces. If their
// parts differ in size, only the smaller one is copied.
func (g *passage) ends(from, next graph.Space) (src, dst graph.BufID) {
	r := g.c.r
	src, dst = g.where(from), g.where(next)
	ps, pd := g.parts[from], g.parts[next]
	if r.place(ps) == r.place(pd) {
		return src, dst
	}
	small := pd
	if r.place(ps).size < r.place(pd).size {
		small = ps
	}
	in := func(s graph.Space, at, part graph.BufID) graph.BufID {
		if s == g.home {
			return small
		}
		return r.in(small, at, part)
	}
	return in(from, src, ps), in(next, dst, pd)
}

// bounce copies between disk and device in chunks, through bounce buffers in host memory.
func (g *passage) bounce(s graph.Space, insert func(graph.Op) *graph.Node) (nodes []*graph.Node) {
	r, w := g.c.r, g.c.w
	part := g.parts[graph.Device]
	for _, piece := range r.chunks(part) {
		buffer := r.mirror(mirrorKey{g.root, graph.Host, g.c.sec, g.turn, piece})
		there := r.in(piece, g.where(graph.Device), part)
		path := []graph.BufID{piece, buffer, there}
		if s == g.home {
			slices.Reverse(path)
		}
		for k := 1; k < len(path); k++ {
			nodes = append(nodes, insert(w.transfer(r.p, r.p.Buf(g.root).Name, path[k-1], path[k], g.pass, g.reg.unit)))
		}
		w.bounces[nodes[len(nodes)-2]] = nodes[len(nodes)-1]
	}
	g.valid[s] = true
	return nodes
}
