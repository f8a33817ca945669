package graph

// Unit is a group of parameters that are gathered together, as a list of segments.
type Unit struct {
	Name     string
	Segments []Segment
	FlatLen  int64 // padded length in elements; set by the sharding rewrite
	Frozen   bool
	Block    Block // the block to which it belongs; a partly frozen block has two units
	Stage    int   // pipeline stage: index along PipelineAxis of the ranks that have it

	// Resident buffers of the unit between steps; set by the sharding rewrite. Value has the
	// (master) parameters, Compute the parameters that the model computes with (Value itself, or
	// its 16-bit copy), States the optimizer states.
	Value, Compute State
	States         []State
	// Grad is the path of its gradients; nil for a frozen unit or one without a layout.
	Grad *Gradient
}

// Segment is a range of one parameter inside a unit's flat parameter. Start and lengths are in
// elements; Flat and Start are multiples of 256.
type Segment struct {
	Param int   // index into Program.Params
	Start int64 // first element of the parameter
	Len   int64
	Flat  int64 // its offset in the flat parameter
}

// State is a resident buffer that holds a unit's flat parameter, or values with the same layout.
// With Axis ≥ 0 the rank with index i along that mesh axis holds elements [i·Len, (i+1)·Len). With
// Axis −1 every rank holds all of them. PerParam states have one element for each distinct
// parameter of the unit, in the order of the segments, on every rank.
//
// A state whose buffer has U8 elements is quantised: the elements are codes, and Program.ScalesOf
// returns the buffer of their scales.
type State struct {
	Name     string // "value", "exp_avg", "exp_avg_sq", "momentum" …
	Buf      BufID
	Axis     int
	Len      int64
	PerParam bool
}
