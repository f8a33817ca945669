package graph

// InitKind selects the distribution of a parameter's initial values.
type InitKind uint8

// Initial values.
const (
	InitNormal InitKind = iota // N(0, Std²)
	InitOnes
	InitZeros
	InitUniform // U(-Std, Std)
)

// Param is a trainable (or frozen) tensor of the model, in Hugging Face's shape.
type Param struct {
	Name   string
	Shape  []int64 // global: of the whole tensor
	Split  *Split  // nil: every rank's model has the complete tensor
	Init   InitKind
	Std    float64
	Unit   int  // index into Program.Units
	Decay  bool // weight decay applies
	Frozen bool
	// TiedTo is 1 + the index of the parameter with the same value on another stage of the
	// pipeline; 0: it is an independent parameter. Such copies come after all others.
	TiedTo int

	Value BufID // the complete value, in the compute dtype; after sharding a view or NoBuf
	Grad  BufID // the complete gradient; NoBuf for frozen parameters and before differentiation
}

// Elems returns the number of elements, of the whole tensor.
func (p *Param) Elems() int64 { return elemsOf(p.Shape) }

// Split divides a parameter, and the values computed from it, into slices of one dimension along a
// mesh axis. Of S slices over T ranks, rank i has slices i·S/T to (i+1)·S/T−1. Each slice on a rank
// is a Param. The first has the parameter's name and place in Program.Params; the others (Of) come
// after all parameters of the model.
//
// The dimension has Groups equal groups, and a slice has an S-th part of each, in sequence. In
// GPT-2's packed queries, keys and values these parts are some of the heads. Slices have equal
// shapes; if S does not divide dimension 0, the last rows of the last slice are unused.
//
// Split is independent of the flat shards of a unit's states: they divide the part that is left to
// a rank, along another axis.
type Split struct {
	Dim    int // of Param.Shape
	Axis   int // mesh axis; −1: one rank has all slices
	Slices int // S; 0: one for each rank
	Slice  int // index among the rank's slices, from 0
	Groups int // 0 means 1
	Of     int // index into Program.Params of the first slice on the rank
}

// extents returns the number of elements of the dimension in each group, and how many of them a
// slice has.
func (s *Split) extents(dim int64, slices int64) (group, part int64) {
	group = dim / int64(max(s.Groups, 1))
	return group, (group + slices - 1) / slices
}
