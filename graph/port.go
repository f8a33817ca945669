package graph

import "strings"

// Port says what the host does with a buffer between operations: it fills what
// comes in and reads what goes out. Each lies in host memory for the whole run;
// copies in the program move it from and to its twin on the device. What a micro-batch
// brings has a port for each (EachMicro); the others are the step's.
type Port uint8

// Ports.
const (
	NoPort        Port = iota
	PortTokens         // in: I32 (rows, T)
	PortTargets        // in: I32 (rows, T)
	PortPositions      // in: I32 (rows, T): of generation's tokens
	PortHyper          // in: F64 (NumHyper): see Hyper* constants
	PortKey            // in: I64 (NumKey): see Key* constants
	PortInput          // in: F32, a float input of the model (Builder.Input); there is one for each
	PortPrefix         // in or out by the section's form: what the frozen beginning of a micro-batch hands on, see recompute.CachePrefix
	PortLoss           // out: F64 (1)
	PortGradNorm       // out: F64 (1)
	PortScale          // out: F64 (NumScale): the state of the loss scale
	PortOverflow       // out: I32 (1)
	PortSquares        // out: I64 (Limbs), the exact sum of the squares of a step's leaves
	PortStaging        // in and out between sections: U8, through which states are initialised, loaded and saved
	NumPorts
)

// ports is the table of ports. A port without a type takes any.
var ports = [NumPorts]struct {
	name    string
	in, out bool // while a section runs
	each    bool // there is one for each micro-batch of a phase (Buffer.Micro)
	typed   bool
	dtype   DType
}{
	NoPort:        {name: "none"},
	PortTokens:    {name: "tokens", in: true, each: true, typed: true, dtype: I32},
	PortTargets:   {name: "targets", in: true, each: true, typed: true, dtype: I32},
	PortPositions: {name: "positions", in: true, typed: true, dtype: I32},
	PortHyper:     {name: "hyper", in: true, typed: true, dtype: F64},
	PortKey:       {name: "key", in: true, each: true, typed: true, dtype: I64},
	PortInput:     {name: "input", in: true, each: true, typed: true, dtype: F32},
	PortPrefix:    {name: "prefix", in: true, out: true, each: true},
	PortLoss:      {name: "loss", out: true, typed: true, dtype: F64},
	PortGradNorm:  {name: "grad-norm", out: true, typed: true, dtype: F64},
	PortScale:     {name: "loss-scale", out: true, typed: true, dtype: F64},
	PortOverflow:  {name: "overflow", out: true, typed: true, dtype: I32},
	PortSquares:   {name: "squares", out: true, typed: true, dtype: I64},
	PortStaging:   {name: "staging"},
}

var portNames = func() (names [NumPorts]string) {
	for i := range ports {
		names[i] = ports[i].name
	}
	return names
}()

func (p Port) String() string { return name(portNames[:], int(p), "port") }

// In says whether the host fills the buffer before each run of a phase.
func (p Port) In() bool { return p < NumPorts && ports[p].in }

// Out says whether the host reads the buffer when a section has ended.
func (p Port) Out() bool { return p < NumPorts && ports[p].out }

// EachMicro says whether every micro-batch of a phase has the port for itself.
func (p Port) EachMicro() bool { return p < NumPorts && ports[p].each }

// Port returns the buffer of a port, of the first micro-batch; NoBuf where the
// program has none.
func (p *Program) Port(port Port) BufID { return p.PortOf(port, 0) }

// PortOf returns the buffer of a port that belongs to a micro-batch of a phase;
// NoBuf where the program has none.
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

// InputsOf returns the buffers of the model's float inputs that belong to a micro-batch
// of a phase, in the order in which the model named them.
func (p *Program) InputsOf(micro int) (list []BufID) {
	for id := range p.Buffers {
		if b := &p.Buffers[id]; b.Port == PortInput && b.Micro == micro {
			list = append(list, BufID(id))
		}
	}
	return list
}

// hostName stands before a model's name of an input in that of its port.
const hostName = "host/"

// InputPort is the name of the port of a float input.
func InputPort(input string) string { return hostName + input }

// InputName is the model's name of the float input whose port b is.
func (b *Buffer) InputName() string { return strings.TrimPrefix(b.PlainName(), hostName) }

// Ports returns the buffers of all ports of the first micro-batch, for whoever
// uses them in every step.
func (p *Program) Ports() [NumPorts]BufID { return p.PortsOf(0) }

// PortsOf is Ports for a micro-batch of a phase; the step's own are the first one's.
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

// portBuffers lists the buffers with a port that want says, in order.
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
