package graph

import (
	"slices"
	"strings"
)

// Find returns the buffer with a name, or NoBuf. It is a linear search.
func (p *Program) Find(name string) BufID {
	return BufID(slices.IndexFunc(p.Buffers, func(b Buffer) bool { return b.Name == name }))
}

// Section returns the section with the given name, or nil.
func (p *Program) Section(name string) *Section {
	for i := range p.Sections {
		if p.Sections[i].Name == name {
			return &p.Sections[i]
		}
	}
	return nil
}

// SectionOf returns the section of a kind and form, or nil. If there are steps of several
// shapes (StepShape) it returns the one with the most micro-batches.
func (p *Program) SectionOf(kind SectionKind, form Form) *Section {
	for i := range p.Sections {
		if p.Sections[i].Kind == kind && p.Sections[i].Form == form {
			return &p.Sections[i]
		}
	}
	return nil
}

// HasKind says whether the program has an operation of a kind.
func (p *Program) HasKind(kind Kind) bool {
	for _, ph := range p.Phases() {
		if slices.ContainsFunc(ph.Ops, func(op Op) bool { return op.Kind == kind }) {
			return true
		}
	}
	return false
}

// Port returns the buffer of a port for micro-batch 0; NoBuf if the program has none.
func (p *Program) Port(port Port) BufID { return p.PortOf(port, 0) }

// PortOf returns the buffer of a port for the given micro-batch of a phase; NoBuf if the
// program has none.
func (p *Program) PortOf(port Port, micro int) BufID {
	if port == NoPort {
		return NoBuf
	}
	for id := range p.Buffers {
		if p.Buffers[id].Port == port && p.Buffers[id].Micro == micro {
			return BufID(id)
		}
	}
	return NoBuf
}

// Ports returns the buffers of all ports for micro-batch 0.
func (p *Program) Ports() [NumPorts]BufID { return p.PortsOf(0) }

// PortsOf returns the buffers of all ports for one micro-batch of a phase; ports that exist once a
// step belong to micro-batch 0.
func (p *Program) PortsOf(micro int) (list [NumPorts]BufID) {
	for i := range list {
		list[i] = NoBuf
	}
	for id := range p.Buffers {
		if b := &p.Buffers[id]; b.Port != NoPort && b.Port < NumPorts && b.Micro == micro && list[b.Port] == NoBuf {
			list[b.Port] = BufID(id)
		}
	}
	return list
}

// portBuffers lists, in order, the buffers whose port satisfies want.
func (p *Program) portBuffers(want func(Port) bool) (list []BufID) {
	for id := range p.Buffers {
		if port := p.Buffers[id].Port; port != NoPort && want(port) {
			list = append(list, BufID(id))
		}
	}
	return list
}

// InPorts lists the buffers that the host fills before a phase runs.
func (p *Program) InPorts() []BufID { return p.portBuffers(Port.In) }

// InputsOf returns the buffers of the model's float inputs for one micro-batch of a phase, in
// the order in which the model declared them.
func (p *Program) InputsOf(micro int) (list []BufID) {
	for id := range p.Buffers {
		if b := &p.Buffers[id]; b.Port == PortInput && b.Micro == micro {
			list = append(list, BufID(id))
		}
	}
	return list
}

// InputName returns the model's name of the float input whose port is b.
func (b *Buffer) InputName() string { return strings.TrimPrefix(b.PlainName(), hostName) }

// HostBuffers returns the buffers that the host reads or writes between sections: those with
// a port, the state of the loss scale and the units' resident states. They have a place in
// memory and are filled even if no operation uses them.
func (p *Program) HostBuffers() []BufID {
	list := p.portBuffers(func(Port) bool { return true })
	add := func(id BufID) {
		if id >= 0 && int(id) < len(p.Buffers) {
			list = append(list, id)
		}
	}
	if s := p.Scaler; s != nil {
		add(s.State)
	}
	for i := range p.Units {
		u := &p.Units[i]
		if u.FlatLen == 0 {
			continue // not laid out yet
		}
		add(u.Value.Buf)
		for _, s := range u.States {
			add(s.Buf)
		}
	}
	return list
}

// Layers returns the number of blocks that repeat.
func (p *Program) Layers() (n int) {
	for u := range p.Units {
		if b := p.Units[u].Block; b.Repeats() {
			n = max(n, b.Index+1)
		}
	}
	return n
}

// BlockOf returns the block of a unit; the zero Block for unit −1.
func (p *Program) BlockOf(unit int) Block {
	if unit < 0 || unit >= len(p.Units) {
		return Block{}
	}
	return p.Units[unit].Block
}

// SameBlock says whether two units are the same or belong to the same block.
func (p *Program) SameBlock(u, v int) bool {
	return u == v || p.BlockOf(u) != (Block{}) && p.BlockOf(u) == p.BlockOf(v)
}

// ScalarsOf returns the set that an update rule's operation reads. ok is false if the
// operation reads no set, or buffers of two sets.
func (p *Program) ScalarsOf(op *Op) (s Scalars, ok bool) {
	info, known := op.Info()
	if !known {
		return Scalars{}, false
	}
	read := Scalars{NoBuf, NoBuf, op.Skip}
	in, _ := info.Operands(op.Attr)
	for i, id := range op.In {
		switch in[i].Name {
		case "hyper":
			read.Hyper = id
		case "coef":
			read.Coef = id
		}
	}
	k := slices.IndexFunc(p.Scalars, func(s Scalars) bool {
		return (read.Hyper == NoBuf || read.Hyper == s.Hyper) && (read.Coef == NoBuf || read.Coef == s.Coef) &&
			(read.Skip == s.Skip || op.Kind == ParamNorms && read.Skip == NoBuf)
	})
	if k < 0 {
		return Scalars{}, false
	}
	return p.Scalars[k], true
}
