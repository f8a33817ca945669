package graph

// Port says how the host uses a buffer between operations: it fills input ports and reads output
// ports. A port's buffer stays in host memory for the complete run; operations of the program copy
// between it and its counterpart on the device. Ports for a micro-batch's data exist once for each
// micro-batch (EachMicro), the others once for the step.
type Port uint8

// Ports.
const (
	NoPort        Port = iota
	PortTokens         // in: I32 (rows, T)
	PortTargets        // in: I32 (rows, T)
	PortPositions      // in: I32 (rows, T), for generation
	PortHyper          // in: F64 (NumHyper): see Hyper* constants
	PortKey            // in: I64 (NumKey): see Key* constants
	PortInput          // in: F32, a float input of the model (Builder.Input); there is one port for each input
	PortPrefix         // in or out by the section's Form: output of the frozen first layers for a micro-batch, see recompute.CachePrefix
	PortLoss           // out: F64 (1)
	PortGradNorm       // out: F64 (1)
	PortScale          // out: F64 (NumScale): the state of the loss scale
	PortOverflow       // out: I32 (1)
	PortSquares        // out: I64 (Limbs): exact sum of squares of the step's leaves (Gradient.Squares)
	PortStaging        // in and out between sections: U8, buffer for initialising, loading and saving states
	NumPorts
)

// ports is the table of ports. A port that is not typed allows any DType.
var ports = [NumPorts]struct {
	name  string
	in    bool // the host fills it before a section runs
	each  bool // each micro-batch of a phase has its own (Buffer.Micro)
	typed bool
	dtype DType
}{
	NoPort:        {name: "none"},
	PortTokens:    {name: "tokens", in: true, each: true, typed: true, dtype: I32},
	PortTargets:   {name: "targets", in: true, each: true, typed: true, dtype: I32},
	PortPositions: {name: "positions", in: true, typed: true, dtype: I32},
	PortHyper:     {name: "hyper", in: true, typed: true, dtype: F64},
	PortKey:       {name: "key", in: true, each: true, typed: true, dtype: I64},
	PortInput:     {name: "input", in: true, each: true, typed: true, dtype: F32},
	PortPrefix:    {name: "prefix", in: true, each: true},
	PortLoss:      {name: "loss", typed: true, dtype: F64},
	PortGradNorm:  {name: "grad-norm", typed: true, dtype: F64},
	PortScale:     {name: "loss-scale", typed: true, dtype: F64},
	PortOverflow:  {name: "overflow", typed: true, dtype: I32},
	PortSquares:   {name: "squares", typed: true, dtype: I64},
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

// EachMicro says whether each micro-batch of a phase has its own buffer for the port.
func (p Port) EachMicro() bool { return p < NumPorts && ports[p].each }

// hostName is the prefix that turns an input's name into the name of its port.
const hostName = "host/"

// InputPort returns the name of the port of a float input.
func InputPort(input string) string { return hostName + input }
