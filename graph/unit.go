package graph

// Unit is what is unsharded together, as a list of segments.
type Unit struct {
	Name     string
	Segments []Segment
	FlatLen  int64 // padded length in elements; set by the sharding rewrite
	Frozen   bool
	Block    Block // what it is a part of: of a partly frozen block there are two units
	Stage    int   // of the pipeline: index along PipelineAxis of the ranks that have it

	// Where the unit's states rest between steps; set by the sharding rewrite.
	// Value is the (master) parameters, Compute what the model computes with (Value
	// itself, or its 16-bit copy), States the optimizer's.
	Value, Compute State
	States         []State
	// Grad is the way of its gradients; nil for one that is frozen or not laid out.
	Grad *Gradient
}

// Segment is a range of one parameter inside a unit's flat parameter. Start and
// lengths are in elements; Flat is a multiple of 256, Start too.
type Segment struct {
	Param int   // index into Program.Params
	Start int64 // first element of the parameter
	Len   int64
	Flat  int64 // where it lies in the flat parameter
}

// State is a resident buffer that holds a unit's flat parameter, or something
// of the same layout. With Axis ≥ 0 the rank with index i along that mesh axis
// holds elements [i·Len, (i+1)·Len); with Axis −1 every rank holds all of it.
// PerParam states have one element for each distinct parameter of the unit, in
// the order of the segments, on every rank.
//
// A state whose buffer has U8 elements is quantised: they are codes, and their scales
// are the buffer's that Program.ScalesOf returns.
type State struct {
	Name     string // "value", "exp_avg", "exp_avg_sq", "momentum" …
	Buf      BufID
	Axis     int
	Len      int64
	PerParam bool
}
