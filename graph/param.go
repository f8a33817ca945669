package graph

// InitKind says how a parameter gets its first values.
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
	Split  *Split  // nil: every rank's model has all of it
	Init   InitKind
	Std    float64
	Unit   int  // index into Program.Units
	Decay  bool // weight decay applies
	Frozen bool
	// TiedTo is 1 + the index of the parameter whose value this is too, on another stage of the
	// pipeline; 0: it is a parameter of its own. Such copies come after all others.
	TiedTo int

	Value BufID // the whole value, in the compute dtype; after sharding a view or NoBuf
	Grad  BufID // the whole gradient; NoBuf for frozen parameters and before differentiation
}

// Elems returns the number of elements, of the whole tensor.
func (p *Param) Elems() int64 { return elemsOf(p.Shape) }

// Split divides a parameter, and with it what is computed of it, into slices of one
// dimension, which lie along a mesh axis: of S slices over T ranks, rank i has slices
// i·S/T to (i+1)·S/T−1. Each slice on a rank is a Param. The first has the parameter's name and
// place in Program.Params; the others (Of) come after all parameters of the model.
//
// A slice has an S-th part of each of Groups equal groups of the dimension, one after the other:
// of GPT-2's packed queries, keys and values those of some heads. Slices have equal shapes; where
// S does not divide dimension 0, the last rows of the last slice belong to no element.
//
// It is beside the flat shards in which a unit's states rest, which are of what is left to a
// rank, along another axis.
type Split struct {
	Dim    int // of Param.Shape
	Axis   int // of the mesh; −1: one rank has all slices
	Slices int // S; 0: one for each rank
	Slice  int // which of the rank's slices it is, from 0
	Groups int // 0: 1
	Of     int // index into Program.Params of the first slice on the rank
}

// extents returns the elements of the dimension in each group, and how many of them a slice has.
func (s *Split) extents(dim int64, slices int64) (group, part int64) {
	group = dim / int64(max(s.Groups, 1))
	return group, (group + slices - 1) / slices
}
