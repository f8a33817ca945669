package graph

import "fmt"

// Gradient is the way of a unit's gradients, from the operations that write them to
// the update. The sharding rewrite decides it once; what adds them up over
// micro-steps, what reduces them over ranks and what gives them a home elsewhere go
// by it:
//
//	every micro-step     backward → Whole (Leaf)
//	                     over the shard axis → Part, which is added to Home
//	                     or, without Part, right into Home
//	after the last one   Home → Sent, over the replicas
//
//	once a step          backward, adding up → Whole → Sent
//	                     over the shard axis and the replicas → Update
//
//	leaf by leaf         every micro-step: backward → Whole (Leaf)
//	                     of this rank's part all ranks' leaves, or the only rank's own,
//	                     are added one after the other to Home
//	after the last one   Home, gathered → Update, where each rank has all of it
//
// Leaf by leaf is Order SumSequential: the sum is then one from left to right over the
// step's micro-batches, whatever the number of ranks.
//
// A buffer that a way does not need is NoBuf, and what it would hold goes on as it is.
type Gradient struct {
	Leaf  DType    // as the backward writes it
	Wire  DType    // as it travels between ranks
	Order SumOrder // in which the ranks' are added
	Int8  bool     // along the shard axis it travels quantised (Quantize), not in Wire; leaf by leaf it is so without one too
	Each  bool     // reduced in every micro-step and then added up, not the other way round

	Axis     int  // mesh axis over which it is summed, −1 where there is one rank
	Parted   bool // a rank keeps its part of that sum; or each has all of it
	Replicas int  // mesh axis of ranks that hold the same parts, −1 where there is none

	Whole  BufID // this rank's gradient of a micro-step, (FlatLen); where they add up there, of the step
	Part   BufID // what a reduction leaves of Whole
	Home   BufID // where the sum rests until the update
	Sent   BufID // copy of the sum, in type Wire, in which it travels
	Update BufID // what the update reads

	Squares BufID // leaf by leaf, where whoever adds a leaf adds its squares: an exact accumulator
}

// Lands returns where the reduction of one micro-step goes, when every one is
// reduced, and whether it must then be added to Home.
func (g *Gradient) Lands() (into BufID, add bool) {
	if g.Part == NoBuf {
		return g.Home, false
	}
	return g.Part, true
}

// Leaves says whether a sum goes leaf by leaf.
func (g *Gradient) Leaves() bool { return g.Order == SumSequential }

// buffers lists the places of the way that name a buffer.
func (g *Gradient) buffers() []*BufID {
	return []*BufID{&g.Whole, &g.Part, &g.Home, &g.Sent, &g.Update, &g.Squares}
}

var gradientBuffers = [...]string{"whole", "part", "home", "sent", "update", "squares"}

// check holds a way against the program's buffers and mesh.
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
		return fmt.Errorf("its gradient goes leaf by leaf into %s of %v: want f32, every micro-step reduced right into it, no copy in which it travels and no replicas", p.bufName(g.Home), of(g.Home).DType)
	case g.Squares != NoBuf && (!g.Leaves() || of(g.Squares).DType != I64):
		return fmt.Errorf("the squares of its gradient's leaves go to %s of %v: want an accumulator of i64, and a sum leaf by leaf", p.bufName(g.Squares), of(g.Squares).DType)
	case g.Part != NoBuf && of(g.Part).Elems() != of(g.Home).Elems():
		return fmt.Errorf("a part %s of its gradient has %d elements, want the %d of %s", p.bufName(g.Part), of(g.Part).Elems(), of(g.Home).Elems(), p.bufName(g.Home))
	}
	return nil
}
