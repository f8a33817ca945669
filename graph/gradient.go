package graph

import "fmt"

// Gradient describes the buffers through which a unit's gradients pass, from the operations
// of the backward that write them to the update. The sharding rewrite fills it in once. The
// passes that accumulate over micro-steps, reduce over ranks and offload gradients read it.
// A leaf is one micro-batch's gradient on one rank, before any sum. There are three ways:
//
//	every micro-step     backward → Whole (a leaf)
//	                     summed over the shard axis → Part, which is added to Home
//	                     or, without Part, directly into Home
//	after the last one   Home → Sent, summed over the replicas
//
//	once a step          backward, accumulating → Whole → Sent
//	                     summed over the shard axis and the replicas → Update
//
//	leaf by leaf         every micro-step: backward → Whole (a leaf)
//	                     this rank's part of all ranks' leaves (of its own leaf with one
//	                     rank) is added to Home, one leaf after another
//	after the last one   Home, gathered → Update, if each rank keeps the whole sum
//
// Leaf by leaf is Order SumSequential: the sum runs from left to right over the step's
// micro-batches, so its bits do not depend on the number of ranks.
//
// A buffer that a way does not need is NoBuf: its step is then left out.
type Gradient struct {
	Leaf  DType    // type in which the backward writes it
	Wire  DType    // type in which it travels between ranks
	Order SumOrder // order in which the ranks' gradients are added
	Int8  bool     // quantised (Quantize), not as Wire, along the shard axis; leaf by leaf even without one
	Each  bool     // true: reduced over ranks every micro-step, then accumulated; false: the reverse

	Axis     int  // mesh axis over which it is summed, −1 where there is one rank
	Parted   bool // a rank keeps only its part of that sum; false: each keeps all of it
	Replicas int  // mesh axis of ranks that hold the same parts, −1 where there is none

	Whole  BufID // this rank's gradient of a micro-step, (FlatLen); of the step, if accumulated there
	Part   BufID // the reduction's result, before it is added to Home
	Home   BufID // where the sum rests until the update
	Sent   BufID // copy of the sum in type Wire, for sending
	Update BufID // input of the update

	Squares BufID // leaf by leaf: exact sum of the squares of the leaves that this rank adds, or NoBuf
}

// Lands returns the buffer into which one micro-step is reduced, if Each is set, and whether
// that buffer must then be added to Home.
func (g *Gradient) Lands() (into BufID, add bool) {
	if g.Part == NoBuf {
		return g.Home, false
	}
	return g.Part, true
}

// Leaves says whether the sum goes leaf by leaf (see Gradient).
func (g *Gradient) Leaves() bool { return g.Order == SumSequential }

// buffers lists the fields that name a buffer.
func (g *Gradient) buffers() []*BufID {
	return []*BufID{&g.Whole, &g.Part, &g.Home, &g.Sent, &g.Update, &g.Squares}
}

var gradientBuffers = [...]string{"whole", "part", "home", "sent", "update", "squares"}

// check validates the gradient against the program's buffers and mesh.
func (g *Gradient) check(p *Program, u *Unit) error {
	for i, id := range g.buffers() {
		needed := i == 0 || i == 2 || i == 4
		if *id == NoBuf && !needed {
			continue
		}
		if *id < 0 || int(*id) >= len(p.Buffers) {
			return fmt.Errorf("its gradient's %s is buffer %d, want one of the program's %d", gradientBuffers[i], *id, len(p.Buffers))
		}
	}
	for _, a := range []int{g.Axis, g.Replicas} {
		if a < -1 || a >= len(p.Mesh) {
			return fmt.Errorf("its gradient goes over mesh axis %d, want -1 to %d", a, len(p.Mesh)-1)
		}
	}
	of := func(id BufID) *Buffer { return p.Buf(id) }
	switch {
	case of(g.Whole).Elems() != u.FlatLen || of(g.Whole).DType != g.Leaf:
		return fmt.Errorf("its gradient %s is %v of %d elements, want %v of the flat length %d", p.bufName(g.Whole), of(g.Whole).DType, of(g.Whole).Elems(), g.Leaf, u.FlatLen)
	case g.Order >= NumSumOrders:
		return fmt.Errorf("its gradient is summed in the order %v, want %v or %v", g.Order, SumTree, SumSequential)
	case g.Sent != NoBuf && of(g.Sent).DType != g.Wire:
		return fmt.Errorf("its gradient travels in %s of %v, want %v", p.bufName(g.Sent), of(g.Sent).DType, g.Wire)
	case g.Leaves() && (!g.Each || g.Replicas >= 0 || g.Sent != NoBuf || g.Part != NoBuf || of(g.Home).DType != F32):
		return fmt.Errorf("its gradient is a sum of leaves, one for each micro-batch, in %s of %v: want f32, "+
			"every micro-step reduced right into it, no copy in which it travels and no replicas", p.bufName(g.Home), of(g.Home).DType)
	case g.Squares != NoBuf && (!g.Leaves() || of(g.Squares).DType != I64):
		return fmt.Errorf("the squares of its gradient's sum of leaves go to %s of %v: want an accumulator of i64, "+
			"and a gradient that is a sum of leaves", p.bufName(g.Squares), of(g.Squares).DType)
	case g.Part != NoBuf && of(g.Part).Elems() != of(g.Home).Elems():
		return fmt.Errorf("a part %s of its gradient has %d elements, want the %d of %s", p.bufName(g.Part), of(g.Part).Elems(), of(g.Home).Elems(), p.bufName(g.Home))
	}
	return nil
}
