package offload

import (
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// passage is the protocol for one root buffer in one stretch: in which spaces its
// contents are valid, operation by operation.
type passage struct {
	c    *coherence
	reg  *stretch
	root graph.BufID
	home graph.Space
	ops  []int // those of the stretch that use the root

	parts [graph.NumSpaces]graph.BufID // what of the root each space holds
	used  [graph.NumSpaces]bool        // foreign spaces that operations work in
	span  extent                       // what of the root the stretch is about
	turn  int                          // the stretch's number among the root's

	at    int           // where fetches may stand; −1: where they are needed
	after []*graph.Node // what they wait for
	pass  graph.Pass

	fresh   bool // the contents from before do not matter
	valid   [graph.NumSpaces]bool
	touched bool // an operation of the stretch has written
	last    int  // the last one that has
}

// root runs the protocol for one root buffer in one stretch. at is where its
// fetches may stand (−1: where they are needed), after what they wait for.
func (c *coherence) root(reg *stretch, root graph.BufID, at int, after []*graph.Node) {
	r := c.r
	g := &passage{c: c, reg: reg, root: root, home: r.p.Buf(root).Space, at: at, after: after, last: -1}
	for _, i := range c.uses[root] {
		if reg.first <= i && i <= reg.last {
			g.ops = append(g.ops, i)
		}
	}
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

// chooseSpan finds what of the root the stretch is about: the part that its one
// foreign space holds, or all of it.
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

// where returns the buffer that holds a space's part of the root.
func (g *passage) where(s graph.Space) graph.BufID {
	if s == g.home {
		return g.parts[g.home]
	}
	return g.c.r.mirror(mirrorKey{g.root, s, g.c.sec, g.turn, g.parts[s]})
}

// operation runs the protocol for one operation: the contents come to where it runs
// if it reads them, and are valid there alone if it writes.
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

// effect says what an operation in space s does with the root's contents. One that
// writes a part needs the rest, where that matters.
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

// enter makes space s valid for operation i: by a fetch ahead of it, or by its write,
// which waits as a fetch would.
func (g *passage) enter(i int, s graph.Space, reads bool) {
	w := g.c.w
	first, waits := w.Base[i], true
	if reads && (!g.fresh || g.touched) {
		pos := i
		if g.at >= 0 && !g.touched {
			pos = min(i, max(g.at, g.c.closedAt(g.root, g.span)+1))
		}
		// The copies are on one stream: what holds the first holds all.
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

// bring copies the contents to space s, from the nearest where they are valid.
func (g *passage) bring(s graph.Space, insert func(graph.Op) *graph.Node) (nodes []*graph.Node) {
	from := g.home
	for x := range graph.NumSpaces {
		if g.valid[x] && (!g.valid[from] || absInt(int(x)-int(s)) < absInt(int(from)-int(s))) {
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

// ends returns what a copy between two neighbouring spaces reads and writes: of a
// larger part only what the smaller one holds moves.
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

// bounce copies between disk and device, piece by piece through bounce buffers.
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
