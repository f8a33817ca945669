package offload

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/nearest"
)

// kind is the kind of a unit's flat buffer: values, grads or states.
type kind uint8

const (
	values kind = iota
	grads
	states
	numKinds
)

// member gives the unit and kind of a flat buffer; kind numKinds: it is no flat buffer of a unit.
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

// located is the position of a buffer: its root, and its bytes in the root.
type located struct {
	root graph.BufID
	extent
}

// locate returns the position of a buffer. It resolves the views of each buffer once.
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

// member returns the unit and kind of a root buffer; false if it is not a unit's flat buffer.
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
	case op.Kind == graph.Scale: // if its inputs are only on the device, the flat gradient is there too
		from := r.p.Buf(r.root(op.In[0])).Class
		return away(op.Out[0].Buf) && from != graph.Activations && from != graph.Communication
	case op.Kind == graph.SqSum:
		return op.Pass == graph.Update && away(op.In[0])
	}
	return false
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
		name += "." + strconv.Itoa(n)
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
	src.Name = root.Name + "@" + key.space.String() + "/" + key.section + "." + strconv.Itoa(key.turn)
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

// extent is the byte range of a buffer in its root. It moves by stride bytes for each rank along
// axis.
type extent struct {
	off, size, stride int64
	axis              int
}

func effects(op *graph.Op, root func(graph.BufID) graph.BufID, visit func(root graph.BufID, e graph.Effect)) {
	graph.Effects(op, func(e graph.Effect) { visit(root(e.Buf), e) })
}

type pieceKey struct {
	id       graph.BufID
	at, size int64
}

// parking has the buffers that an activation passes through when it is parked, and the buffer that
// later uses read.
type parking struct {
	stops   []graph.BufID // from the device to its place and back: [host] or [bounce out, disk, bounce in]
	fetched graph.BufID
}

// checkNames returns an error if a pattern matches no activation of the program. It runs before
// the program is changed.
func (r *rewriter) checkNames() error {
	for _, p := range r.o.parts(graph.Activations) {
		for _, pattern := range p.Buffers {
			found := false
			var names []string
			for id := range r.p.Buffers {
				b := &r.p.Buffers[id]
				if b.Class != graph.Activations || b.Life != graph.LifePhase || b.View != nil {
					continue
				}
				if ok, _ := graph.MatchName(pattern, b.Name); ok {
					found = true
					break
				}
				names = append(names, b.Name)
			}
			if !found {
				return fmt.Errorf("offload: no activation matches %.80q; the nearest are %s; spillway plan lists the largest by name", pattern, strings.Join(nearest.Patterns(pattern, names, 3), ", "))
			}
		}
	}
	return nil
}
