package graph

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
// A buffer that a way does not need is NoBuf, and its step is left out.
type Gradient struct {
	Leaf  DType    // type in which the backward writes the gradient
	Wire  DType    // type in which the gradient is sent between ranks
	Order SumOrder // order in which the ranks' gradients are added
	Int8  bool     // sent as int8 (Quantize), not as Wire, along the shard axis; leaf by leaf even without one
	Each  bool     // true: reduced over ranks every micro-step, then accumulated; false: the reverse

	Axis     int  // mesh axis over which it is summed, −1 for one rank
	Parted   bool // a rank keeps only its part of that sum; false: each keeps all of it
	Replicas int  // mesh axis of the ranks that hold the same parts, −1 for none

	Whole  BufID // this rank's gradient of a micro-step, (FlatLen); of the step if the backward accumulates there
	Part   BufID // the reduction's result, before it is added to Home
	Home   BufID // the sum until the update
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
