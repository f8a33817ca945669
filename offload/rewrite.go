package offload

import (
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// Rewrite moves the classes that o names to host memory or disk. It inserts the copies that keep
// every operation's operands in its own space, and places the update where it then runs
// (update.go). The program must be sharded and not yet scheduled.
//
// A LifeRun buffer of a moved class gets its home in that space. Operations stay on the device,
// except these, which run on the host: updates of units whose optimizer states are off the
// device, sums of squares of gradients that are off the device (the norm is computed where the
// gradient is), and fills of buffers that are off the device. With each operation's space fixed,
// a copy protocol like that of a cache inserts the copies: see coherence.go. Activations are
// parked: see park.go.
func Rewrite(p *graph.Program, o Options) (*graph.Program, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	q := p.Clone()
	r := &rewriter{p: q, o: o, located: make([]located, 0, 2*len(q.Buffers)), hostUnits: map[int]bool{},
		mirrors: map[mirrorKey]graph.BufID{}, views: map[viewKey]graph.BufID{}, parked: map[graph.BufID]*parking{}, pieces: map[pieceKey]graph.BufID{}, stays: map[graph.BufID]bool{}}
	if !o.Active() {
		r.placeUpdate()
		return q, nil
	}
	if err := r.checkNames(); err != nil {
		return nil, err
	}
	r.classify()
	r.chooseHomes()
	r.placeUpdate()
	r.settle()
	var elems int64
	largest := make([]int64, len(q.Units))
	for id, m := range r.members {
		if m.kind < numKinds {
			largest[m.unit] = max(largest[m.unit], q.Buffers[id].Elems())
		}
	}
	for _, n := range largest {
		elems += n
	}
	r.chunk = o.chunk(elems)
	for i := range q.Sections {
		r.section(&q.Sections[i])
	}
	return q, nil
}

// kind is the kind of a unit's flat buffer: values, grads or states.
type kind uint8

const (
	values kind = iota
	grads
	states
	numKinds
)

// member says to which unit a flat buffer belongs, and its kind; numKinds: it is none.
type member struct {
	kind kind
	unit int
}

type rewriter struct {
	p         *graph.Program
	o         Options
	located   []located               // by buffer
	members   []member                // by root buffer
	homes     [numKinds][]graph.Space // by unit
	hostUnits map[int]bool            // units that are updated on the host
	stays     map[graph.BufID]bool    // gradients that stay on the device: see settleGrads
	mirrors   map[mirrorKey]graph.BufID
	views     map[viewKey]graph.BufID
	parked    map[graph.BufID]*parking
	pieces    map[pieceKey]graph.BufID
	chunk     int64 // elements
}

// located is where a buffer lies: its root, and its bytes there.
type located struct {
	root graph.BufID
	extent
}

// locate returns where a buffer lies. It resolves the views of each buffer once.
func (r *rewriter) locate(id graph.BufID) *located {
	for k := len(r.located); k < len(r.p.Buffers); k++ {
		l := located{graph.BufID(k), extent{size: r.p.Buffers[k].Bytes()}}
		for v := r.p.Buf(l.root).View; v != nil; v = r.p.Buf(l.root).View {
			l.off += v.Offset
			if v.RankStride != 0 {
				l.stride += v.RankStride
				l.axis = v.Axis
			}
			l.root = v.Base
		}
		r.located = append(r.located, l)
	}
	return &r.located[id]
}

func (r *rewriter) root(id graph.BufID) graph.BufID { return r.locate(id).root }

func (r *rewriter) place(id graph.BufID) extent { return r.locate(id).extent }

// member returns the unit and kind of a root buffer; false if it is no unit's flat buffer.
func (r *rewriter) member(root graph.BufID) (m member, ours bool) {
	if int(root) < len(r.members) {
		m = r.members[root]
		ours = m.kind < numKinds
	}
	return m, ours
}

// classify finds the resident buffers of every unit: the parameters with which the model
// computes, the gradients kept until the update (graph.Gradient), and the update's states.
func (r *rewriter) classify() {
	r.members = make([]member, len(r.p.Buffers))
	for id := range r.members {
		r.members[id].kind = numKinds
	}
	for u := range r.p.Units {
		unit := &r.p.Units[u]
		if unit.FlatLen == 0 {
			continue
		}
		for _, s := range append([]graph.State{unit.Value}, unit.States...) {
			r.members[r.root(s.Buf)] = member{states, u} // for Value: the master, if there is one
		}
		r.members[r.root(unit.Compute.Buf)] = member{values, u}
		if g := unit.Grad; g != nil {
			for _, id := range []graph.BufID{g.Home, g.Sent, g.Update} {
				if id != graph.NoBuf && r.p.Buf(id).Life != graph.LifePhase { // else it is reduced at once
					r.members[r.root(id)] = member{grads, u}
				}
			}
		}
	}
}

// chooseHomes decides where each unit's buffers of each kind rest, and which units are updated
// on the host.
func (r *rewriter) chooseHomes() {
	var bytes [numKinds][]int64
	for k := range bytes {
		bytes[k] = make([]int64, len(r.p.Units))
	}
	for id, m := range r.members {
		if m.kind < numKinds {
			bytes[m.kind][m.unit] += r.p.Buffers[id].Bytes()
		}
	}
	for k, class := range [numKinds]graph.Class{values: graph.Parameters, grads: graph.Gradients, states: graph.Optimizer} {
		r.homes[k] = r.o.placeUnits(class, bytes[k])
	}
	for u, space := range r.homes[states] {
		if space != graph.Device {
			r.hostUnits[u] = true
		}
	}
}

// settle moves the buffers, and their views, to their homes.
func (r *rewriter) settle() {
	for id := range r.p.Buffers {
		root := r.root(graph.BufID(id))
		m, ours := r.member(root)
		if !ours || r.stays[root] {
			continue
		}
		if space := r.homes[m.kind][m.unit]; space != graph.Device {
			r.p.Buffers[id].Space = space
		}
	}
}

// isRule says whether an operation belongs to an optimizer's update rule.
func isRule(op *graph.Op) bool { _, ok := op.Attr.(graph.UpdateAttr); return ok }

// onHost says whether an operation runs on the host.
func (r *rewriter) onHost(op *graph.Op) bool {
	away := func(id graph.BufID) bool {
		root := r.root(id)
		_, ours := r.member(root)
		return ours && r.p.Buf(root).Space != graph.Device
	}
	switch {
	case isRule(op):
		return r.hostUnits[op.Unit]
	case op.Kind == graph.Fill:
		return away(op.Out[0].Buf)
	case op.Kind == graph.Scale: // of what is on the device alone, the flat gradient is there too
		from := r.p.Buf(r.root(op.In[0])).Class
		return away(op.Out[0].Buf) && from != graph.Activations && from != graph.Communication
	case op.Kind == graph.SqSum:
		return op.Pass == graph.Update && away(op.In[0])
	}
	return false
}

func (r *rewriter) section(sec *graph.Section) {
	slots := make([][]int, len(sec.Phases))
	for j := range sec.Phases {
		slots[j] = r.split(&sec.Phases[j])
	}
	before := append([]graph.Phase(nil), sec.Phases...) // the phases before any insertion
	index := r.usesAway(before)
	for j := range sec.Phases {
		ph := &sec.Phases[j]
		w := newWeave(ph)
		name := sec.Name
		if sec.Kind == graph.SectionFlush {
			name = graph.SectionStep.String() // the same updates as in the step use its mirrors
		}
		c := &coherence{r: r, w: w, sec: name, phases: before, index: index, phase: j, slot: slots[j], closed: map[graph.BufID][]closing{}}
		c.collect()
		c.run()
		if r.o.parks() {
			r.park(w)
		}
		w.commit(min(r.o.Ahead, 1) + 1)
	}
}

// usesAway lists, by phase and root, the operations that use a buffer which is not on the device, or which
// an operation on the host uses: no other needs copies.
func (r *rewriter) usesAway(phases []graph.Phase) [][][]int {
	away := make([]bool, len(r.p.Buffers))
	for id := range away {
		away[id] = r.p.Buffers[id].Space != graph.Device
	}
	for j := range phases {
		for i := range phases[j].Ops {
			if op := &phases[j].Ops[i]; r.onHost(op) {
				effects(op, r.root, func(root graph.BufID, _ graph.Effect) { away[root] = true })
			}
		}
	}
	index := make([][][]int, len(phases))
	for j := range phases {
		index[j] = make([][]int, len(away))
		for i := range phases[j].Ops {
			effects(&phases[j].Ops[i], r.root, func(root graph.BufID, _ graph.Effect) {
				if list := index[j][root]; away[root] && (len(list) == 0 || list[len(list)-1] != i) {
					index[j][root] = append(list, i)
				}
			})
		}
	}
	return index
}

// transfer returns a copy between two neighbouring spaces, on the stream for its direction.
func (w *weave) transfer(p *graph.Program, what string, from, to graph.BufID, pass graph.Pass, unit int) graph.Op {
	a, b := p.Buf(from).Space, p.Buf(to).Space
	verb, stream := "fetch", graph.CopyIn
	switch {
	case a == graph.Device:
		verb, stream = "park", graph.CopyOut
	case b == graph.Disk:
		verb, stream = "store", graph.DiskOut
	case a == graph.Disk:
		verb, stream = "load", graph.DiskIn
	}
	name := what + "/" + verb
	w.names[name]++
	if n := w.names[name]; n > 1 {
		name = fmt.Sprintf("%s.%d", name, n)
	}
	op := graph.NewCopy(name, from, to, stream, pass, unit)
	for _, id := range []graph.BufID{from, to} { // the buffers of a parked activation
		if micro, ok := p.MicroOf(id); ok {
			op.Micro = micro
		}
	}
	return op
}

// mirrorKey identifies a mirror. Phases of a section share mirrors.
type mirrorKey struct {
	root    graph.BufID
	space   graph.Space
	section string
	turn    int         // number of the stretch among those of the root in its phase
	part    graph.BufID // the part of the root that it holds
}

type viewKey struct{ id, base graph.BufID }

// mirror returns the buffer that mirrors part of a root in another space.
func (r *rewriter) mirror(key mirrorKey) graph.BufID {
	id, ok := r.mirrors[key]
	if ok {
		return id
	}
	src := *r.p.Buf(key.part)
	root := r.p.Buf(key.root)
	src.View, src.Space, src.Life, src.Class = nil, key.space, graph.LifePhase, graph.Communication
	m, ours := r.member(key.root)
	if ours && key.space == graph.Device && m.kind != states && r.place(key.part).stride == 0 && root.Elems() == r.p.Units[m.unit].FlatLen {
		src.Class = graph.Unsharded
	}
	if !ours {
		src.Class = graph.Workspace
	}
	src.Name = fmt.Sprintf("%s@%s/%s.%d", root.Name, key.space, key.section, key.turn)
	if key.part != key.root {
		src.Name += "/part"
	}
	src.Pad = 0
	if src.Bytes() == root.Bytes() {
		src.Pad = root.Pad
	}
	id = r.p.AddBuffer(src)
	r.mirrors[key] = id
	return id
}

// in returns the buffer or view in a mirror that corresponds to id. The mirror holds the given
// part of id's root.
func (r *rewriter) in(id, mirror, part graph.BufID) graph.BufID {
	at, from := r.place(id), r.place(part)
	m, b := r.p.Buf(mirror), r.p.Buf(id)
	if at == from && slices.Equal(m.Shape, b.Shape) && m.DType == b.DType {
		return mirror
	}
	key := viewKey{id, mirror}
	v, ok := r.views[key]
	if !ok {
		nb := *b
		nb.Space, nb.Class, nb.Life, nb.Pad = m.Space, m.Class, m.Life, 0
		nb.Name = b.Name + "@" + m.Space.String()
		nb.View = &graph.View{Base: mirror, Offset: at.off - from.off}
		if at.stride != from.stride {
			nb.View.RankStride, nb.View.Axis = at.stride-from.stride, at.axis
		}
		if s := &nb.Scale; s.Block > 0 {
			s.Of = r.in(s.Of, mirror, part)
		}
		v = r.p.AddBuffer(nb)
		r.views[key] = v
	}
	return v
}

// extent is the byte range of a buffer in its root.
type extent struct {
	off, size, stride int64
	axis              int
}
