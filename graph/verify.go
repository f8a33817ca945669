package graph

import (
	"fmt"
	"strings"
)

// Verify returns an error unless p is a program that can run as it is written. It
// is VerifyStructure and VerifyOrder.
func Verify(p *Program) error {
	v, err := structure(p)
	if err == nil {
		err = v.order()
	}
	if err != nil {
		return fmt.Errorf("graph: verify: %w", err)
	}
	return nil
}

// VerifyStructure checks what holds of a program after every pass:
//
//   - buffers have sizes, views lie inside their bases, aligned and of their
//     type; scales are as many as their values' blocks and lie in one buffer with
//     them; parameters, units and well-known buffers refer to what exists;
//   - every operation is right by the kind table (Check), its operands are in one
//     memory space (a copy's may be in two), and its name is unique in its phase;
//   - no operation mixes micro-batches; each run of a phase has the same ranks at work;
//   - collectives of one mesh axis are on one stream, so that every rank meets
//     them in one order.
//
// The error names section, phase and operation, and the buffer. The time grows
// with the number of operands.
func VerifyStructure(p *Program) error {
	if _, err := structure(p); err != nil {
		return fmt.Errorf("graph: verify: %w", err)
	}
	return nil
}

// VerifyOrder checks what holds once operations have their events, and in a
// program on one stream before that. The program's structure must be sound:
//
//   - each wait has a record before it in the section;
//   - of two operations that touch the same bytes, one of them writing, one
//     happens before the other (see Trace), also from one repetition of a phase
//     to the next;
//   - every byte read has been written earlier in the section, and in the same
//     run of the phase for a LifePhase buffer, flat-parameter padding excepted.
//     LifeRun buffers need a writer anywhere: an operation of some section, or the
//     host. Inputs that no operation writes are the host's.
//
// The error names section, phase and operation, the buffer, and the other
// operation where there is one. A buffer that is used in many different ranges
// costs that number for each use.
func VerifyOrder(p *Program) error {
	regions, err := NewRegions(p)
	if err == nil {
		v := verifier{p: p, regions: regions}
		err = v.order()
	}
	if err != nil {
		return fmt.Errorf("graph: verify: %w", err)
	}
	return nil
}

func structure(p *Program) (*verifier, error) {
	v := &verifier{p: p}
	if err := v.tables(); err != nil {
		return nil, err
	}
	var err error
	if v.regions, err = NewRegions(p); err != nil {
		return nil, err
	}
	for _, check := range []func() error{v.buffers, v.scales, v.operations, v.micros, v.shares, v.collectives} {
		if err := check(); err != nil {
			return nil, err
		}
	}
	return v, nil
}

func (v *verifier) order() error {
	v.writers()
	return v.sections()
}

type verifier struct {
	p       *Program
	regions *Regions
	filled  []bool // by root buffer: holds contents that no operation need write
}

// tables checks everything that is not an operation, but for sizes and views.
func (v *verifier) tables() error {
	p := v.p
	axes := map[string]bool{}
	for i, a := range p.Mesh {
		if a.Size < 1 {
			return fmt.Errorf("mesh axis %d (%s) has size %d, want at least 1", i, a.Name, a.Size)
		}
		if axes[a.Name] {
			return fmt.Errorf("mesh axis %d is named %q as one before it", i, a.Name)
		}
		axes[a.Name] = true
	}
	unit := func(i int) error {
		if i < -1 || i >= len(p.Units) {
			return fmt.Errorf("belongs to unit %d, want one of the program's %d or -1", i, len(p.Units))
		}
		return nil
	}
	if err := v.ports(unit); err != nil {
		return err
	}
	ref := func(what string, id BufID) error {
		if id != NoBuf && (id < 0 || int(id) >= len(p.Buffers)) {
			return fmt.Errorf("%s is buffer %d, want one of the program's %d or none", what, id, len(p.Buffers))
		}
		return nil
	}
	for _, w := range p.wellKnown() {
		if err := ref(w.name, *w.id); err != nil {
			return err
		}
		if *w.id != NoBuf && w.typed && p.Buf(*w.id).DType != w.dtype {
			return fmt.Errorf("%s (%s) is %v, want %v", w.name, p.bufName(*w.id), p.Buf(*w.id).DType, w.dtype)
		}
	}
	if err := v.params(ref); err != nil {
		return err
	}
	for i := range p.Units {
		if err := v.unit(&p.Units[i]); err != nil {
			return fmt.Errorf("unit %d (%s): %w", i, p.Units[i].Name, err)
		}
	}
	for i := range p.Scalars {
		if err := p.Scalars[i].check(p); err != nil {
			return fmt.Errorf("scalars %d: %w", i, err)
		}
	}
	return v.sectionTables(unit)
}

// ports checks the buffers' units, micro-batches and ports.
func (v *verifier) ports(unit func(int) error) error {
	p := v.p
	type portKey struct {
		port  Port
		micro int
		input string // of float inputs
	}
	ported := map[portKey]BufID{}
	for id := range p.Buffers {
		b := &p.Buffers[id]
		if err := unit(b.Unit); err != nil {
			return fmt.Errorf("buffer %s: %w", p.bufName(BufID(id)), err)
		}
		if b.Micro < 0 {
			return fmt.Errorf("buffer %s: belongs to micro-batch %d, want 0 or more", p.bufName(BufID(id)), b.Micro)
		}
		if b.Port != NoPort && !b.Port.EachMicro() && b.Micro > 0 {
			return fmt.Errorf("buffer %s: is the port %v of micro-batch %d; the step has one for all", p.bufName(BufID(id)), b.Port, b.Micro)
		}
		if b.Port == NoPort {
			continue
		}
		key := portKey{port: b.Port, micro: b.Micro}
		if b.Port == PortInput {
			key.input = b.InputName()
		}
		other, twice := ported[key]
		switch {
		case b.Port >= NumPorts:
			return fmt.Errorf("buffer %s: %v is not a port", p.bufName(BufID(id)), b.Port)
		case twice:
			return fmt.Errorf("buffers %s and %s are both the port %v of micro-batch %d, want one", p.bufName(other), p.bufName(BufID(id)), b.Port, b.Micro)
		case b.Space != Host:
			return fmt.Errorf("buffer %s is the port %v and lies in %v memory, want host: the host uses it", p.bufName(BufID(id)), b.Port, b.Space)
		case ports[b.Port].typed && b.DType != ports[b.Port].dtype:
			return fmt.Errorf("buffer %s is the port %v and %v, want %v", p.bufName(BufID(id)), b.Port, b.DType, ports[b.Port].dtype)
		}
		ported[key] = BufID(id)
	}
	return nil
}

// params checks the parameters and where they and their gradients lie.
func (v *verifier) params(ref func(what string, id BufID) error) error {
	p := v.p
	names := make(map[string]bool, len(p.Params))
	for i := range p.Params {
		q := &p.Params[i]
		if names[q.Name] {
			return fmt.Errorf("two parameters are named %q", q.Name)
		}
		names[q.Name] = true
		if q.Unit < 0 || q.Unit >= len(p.Units) {
			return fmt.Errorf("parameter %s: belongs to unit %d, want one of the program's %d", q.Name, q.Unit, len(p.Units))
		}
		if q.TiedTo < 0 || q.TiedTo > i || q.TiedTo > 0 && !q.tied(&p.Params[q.TiedTo-1]) {
			return fmt.Errorf("parameter %s: is tied to parameter %d, want one before it with the same shape and slices, in another unit", q.Name, q.TiedTo-1)
		}
		if err := p.checkSplit(q); err != nil {
			return fmt.Errorf("parameter %s: %w", q.Name, err)
		}
		for _, b := range [...]struct {
			what string
			id   BufID
		}{{"value", q.Value}, {"gradient", q.Grad}} {
			if err := ref("its "+b.what, b.id); err != nil {
				return fmt.Errorf("parameter %s: %w", q.Name, err)
			}
			if b.id != NoBuf && p.Buf(b.id).Elems() != p.LocalElems(q) {
				return fmt.Errorf("parameter %s: its %s %s has shape %v, want the %d elements of %v", q.Name, b.what, p.bufName(b.id), p.Buf(b.id).Shape, p.LocalElems(q), p.LocalShape(q))
			}
		}
		if q.Frozen && q.Grad != NoBuf {
			return fmt.Errorf("parameter %s: is frozen and has the gradient %s", q.Name, p.bufName(q.Grad))
		}
	}
	return nil
}

// sectionTables checks the names of sections, phases and operations.
func (v *verifier) sectionTables(unit func(int) error) error {
	p := v.p
	sections := map[string]bool{}
	for i := range p.Sections {
		s := &p.Sections[i]
		if s.Name == "" || sections[s.Name] {
			return fmt.Errorf("section %d is named %q; a section needs a name of its own", i, s.Name)
		}
		sections[s.Name] = true
		phases := map[string]bool{}
		for j := range s.Phases {
			ph := &s.Phases[j]
			if ph.Name == "" || phases[ph.Name] {
				return fmt.Errorf("%s: phase %d is named %q; a phase needs a name of its own", s.Name, j, ph.Name)
			}
			phases[ph.Name] = true
			if ph.Repeat < 0 {
				return fmt.Errorf("%s/%s: runs %d times, want 0 or more", s.Name, ph.Name, ph.Repeat)
			}
			ops := make(map[string]bool, len(ph.Ops))
			for k := range ph.Ops {
				op := &ph.Ops[k]
				if op.Name == "" || ops[op.Name] {
					return fmt.Errorf("%s/%s: operation %d (%s) is named %q; an operation needs a name of its own in its phase", s.Name, ph.Name, k, op.Kind, op.Name)
				}
				ops[op.Name] = true
				if err := unit(op.Unit); err != nil {
					return fmt.Errorf("%s/%s/%s: %w", s.Name, ph.Name, op.Name, err)
				}
			}
		}
	}
	return nil
}

// segmentElems is what parameters' starts in a flat parameter, and segments'
// starts in a parameter, are multiples of.
const segmentElems = 256

func (v *verifier) unit(u *Unit) error {
	p := v.p
	end := int64(0)
	for i, s := range u.Segments {
		if s.Param < 0 || s.Param >= len(p.Params) {
			return fmt.Errorf("segment %d is of parameter %d, want one of the program's %d", i, s.Param, len(p.Params))
		}
		q := &p.Params[s.Param]
		switch {
		case s.Start < 0 || s.Len < 1 || s.Len > p.LocalElems(q) || s.Start > p.LocalElems(q)-s.Len:
			return fmt.Errorf("segment %d has elements %d to %d of %s, want a part of its %d", i, s.Start, s.Start+s.Len, q.Name, p.LocalElems(q))
		case s.Start%segmentElems != 0 || s.Flat%segmentElems != 0:
			return fmt.Errorf("segment %d of %s starts at element %d of it and %d of the unit, want multiples of %d", i, q.Name, s.Start, s.Flat, segmentElems)
		case s.Flat < end:
			return fmt.Errorf("segment %d of %s starts at element %d of the unit, inside the segment before it or out of order, want %d or more", i, q.Name, s.Flat, end)
		}
		end = s.Flat + s.Len
	}
	if u.FlatLen == 0 {
		return nil // not laid out yet
	}
	if u.FlatLen < end {
		return fmt.Errorf("flat length %d, want at least the %d elements of its segments", u.FlatLen, end)
	}
	if u.Grad != nil {
		if err := u.Grad.check(p, u); err != nil {
			return err
		}
	}
	for _, s := range append([]State{u.Value, u.Compute}, u.States...) {
		if s.Buf < 0 || int(s.Buf) >= len(p.Buffers) {
			return fmt.Errorf("state %s is buffer %d, want one of the program's %d", s.Name, s.Buf, len(p.Buffers))
		}
		if n := p.Buf(s.Buf).Elems(); n != s.Len {
			return fmt.Errorf("state %s (%s) has %d elements, want the %d that a rank holds", s.Name, p.bufName(s.Buf), n, s.Len)
		}
		if s.Axis < -1 || s.Axis >= len(p.Mesh) {
			return fmt.Errorf("state %s is split along mesh axis %d, want -1 to %d", s.Name, s.Axis, len(p.Mesh)-1)
		}
	}
	return nil
}

type wellKnown struct {
	name  string
	id    *BufID
	typed bool
	dtype DType
}

// wellKnown lists the program's named buffers in the order of their fields.
func (p *Program) wellKnown() []wellKnown {
	list := []wellKnown{
		{"tokens", &p.Tokens, true, I32}, {"targets", &p.Targets, true, I32}, {"positions", &p.Positions, true, I32},
		{"hyper", &p.Hyper, true, F64}, {"key", &p.Key, true, I64},
		{"loss", &p.Loss, true, F64}, {"grad-norm", &p.GradNorm, true, F64}, {"logits", &p.Logits, false, F32},
	}
	if s := p.Scaler; s != nil {
		list = append(list, wellKnown{"loss-scale", &s.State, true, F64}, wellKnown{"overflow", &s.Overflow, true, I32})
	}
	return list
}

// buffers checks what needs resolved views. A buffer of bytes (U8) may hold
// views of any type.
func (v *verifier) buffers() error {
	p := v.p
	for id := range p.Buffers {
		b, g := &p.Buffers[id], v.regions.Of[id]
		if b.Place != nil && len(b.Place) != len(p.Mesh) {
			return fmt.Errorf("buffer %s: %d placements, want one for each of %d mesh axes", p.bufName(BufID(id)), len(b.Place), len(p.Mesh))
		}
		if err := p.checkGlobal(b); err != nil {
			return fmt.Errorf("buffer %s: %w", p.bufName(BufID(id)), err)
		}
		if b.View == nil {
			continue
		}
		base := p.Buf(b.View.Base)
		if base.DType != b.DType && base.DType != U8 {
			return fmt.Errorf("buffer %s: is %v, its base %s %v; a view has the type of its base, or one of bytes", p.bufName(BufID(id)), b.DType, p.bufName(b.View.Base), base.DType)
		}
		if size := b.DType.Size(); g.Lo%size != 0 || b.View.RankStride%size != 0 {
			return fmt.Errorf("buffer %s: starts at byte %d, with a rank stride of %d, want multiples of the %d bytes of %v", p.bufName(BufID(id)), g.Lo, b.View.RankStride, size, b.DType)
		}
	}
	for _, id := range p.HostBuffers() {
		if root := p.Buf(v.regions.Of[id].Root); root.Life != LifeRun {
			return fmt.Errorf("buffer %s: lives for a %v, want run: the host uses it between sections", root.Name, root.Life)
		}
	}
	return nil
}

// checkGlobal holds a buffer's global shape against its own and its placements.
func (p *Program) checkGlobal(b *Buffer) error {
	if len(b.Global) == 0 {
		return nil
	}
	global, parts := elemsOf(b.Global), int64(1)
	for axis, place := range b.Place {
		if place == Sharded {
			parts *= int64(p.Mesh[axis].Size)
		}
	}
	if b.Elems()*parts != global {
		return fmt.Errorf("%d elements on each of %d ranks that have a part each, want the %d of global shape %v", b.Elems(), parts, global, b.Global)
	}
	return nil
}

// operations checks each operation by itself.
func (v *verifier) operations() error {
	p := v.p
	var c checker // one for all: a deep model has many operations
	own := map[Kind]*Operation{}
	return v.each(func(op *Op) error {
		if err := p.checkRefs(op); err != nil {
			return err
		}
		info, ok := op.Info()
		if !ok {
			return Check(p, op)
		}
		if err := checkOwn(op, own); err != nil {
			return err
		}
		if err := info.check1(&c, p, op); err != nil {
			return err
		}
		if op.Pass > Update {
			return fmt.Errorf("%v is not a pass", op.Pass)
		}
		if op.Skip != NoBuf {
			if s := p.Buf(op.Skip); s.DType != I32 || s.Elems() != 1 {
				return fmt.Errorf("skip flag %s is %v %v, want one i32", p.bufName(op.Skip), s.DType, s.Shape)
			}
		}
		var first BufID = NoBuf
		var err error
		Effects(op, func(e Effect) {
			space := p.Buf(e.Buf).Space
			switch {
			case err != nil || op.Kind == Copy && e.Buf != op.Skip:
			case space == Disk:
				err = fmt.Errorf("%s is on %v, which only copies reach", p.bufName(e.Buf), space)
			case first == NoBuf:
				first = e.Buf
			case space != p.Buf(first).Space:
				err = fmt.Errorf("%s is in %v memory and %s in %v, want one memory space", p.bufName(first), p.Buf(first).Space, p.bufName(e.Buf), space)
			}
		})
		if err == nil && op.Work != NoBuf {
			err = v.workspaceApart(op)
		}
		return err
	})
}

func (v *verifier) workspaceApart(op *Op) error {
	work := v.regions.Of[op.Work]
	var err error
	Effects(op, func(e Effect) {
		if err == nil && !(e.Fresh && e.Buf == op.Work) && v.regions.overlap(work, v.regions.Of[e.Buf]) {
			err = fmt.Errorf("its workspace %s overlaps its operand %s", v.p.bufName(op.Work), v.p.bufName(e.Buf))
		}
	})
	return err
}

func (v *verifier) each(check func(op *Op) error) error {
	for s, ph := range v.p.Phases() {
		for k := range ph.Ops {
			op := &ph.Ops[k]
			if err := check(op); err != nil {
				msg := strings.TrimPrefix(err.Error(), "graph: "+op.Name+" ")
				return fmt.Errorf("%s/%s/%s: %s", s.Name, ph.Name, op.Name, msg)
			}
		}
	}
	return nil
}

// collectives checks that each group's are on one stream.
func (v *verifier) collectives() error {
	stream := map[int]StreamID{}
	name := map[int]string{}
	return v.each(func(op *Op) error {
		var axis int
		switch a := op.Attr.(type) {
		case GroupAttr:
			axis = a.Axis
		case PeerAttr:
			axis = a.Axis
		default:
			return nil
		}
		if s, ok := stream[axis]; ok && s != op.Stream {
			return fmt.Errorf("is a collective on stream %v, and %s of the same group (mesh axis %d) on stream %v; ranks could meet them in different orders", op.Stream, name[axis], axis, s)
		}
		stream[axis], name[axis] = op.Stream, op.Name
		return nil
	})
}

// writers finds what the host fills, and LifeRun buffers that are read and that
// nothing fills.
func (v *verifier) writers() {
	p := v.p
	v.filled = make([]bool, len(p.Buffers))
	written := make([]bool, len(p.Buffers))
	fresh := make([]bool, len(p.Buffers))
	v.each(func(op *Op) error {
		Effects(op, func(e Effect) {
			root := v.regions.Of[e.Buf].Root
			written[root] = written[root] || e.Write
			fresh[root] = fresh[root] || e.Fresh
		})
		return nil
	})
	host := func(id BufID) {
		if id != NoBuf {
			v.filled[v.regions.Of[id].Root] = true
		}
	}
	for _, id := range p.HostBuffers() {
		host(id)
	}
	for i := range p.Params {
		if id := p.Params[i].Value; id != NoBuf && p.Buf(v.regions.Of[id].Root).Life == LifeRun {
			host(id)
		}
	}
	// Between rewrites inputs are not copied in yet, nor is the loss zeroed.
	input := func(id BufID) {
		if id != NoBuf && !fresh[v.regions.Of[id].Root] {
			host(id)
		}
	}
	for _, id := range []BufID{p.Tokens, p.Targets, p.Positions, p.Hyper, p.Key, p.Loss} {
		input(id)
	}
	for id := range p.Buffers {
		b := &p.Buffers[id]
		if b.View == nil && b.Class == Inputs {
			input(BufID(id))
		}
		if b.View == nil && b.Life == LifeRun && written[id] {
			v.filled[id] = true
		}
	}
}
