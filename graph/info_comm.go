package graph

// Collectives and memory operations. They have no derivative, because rewrites add them after
// differentiation.
var movingKinds = []*Info{
	{
		Kind:   AllGather,
		Doc:    "full = the ranks' shards in rank order; shard (S), full (W·S) of any type, W the size of the group; shard may be the rank's view of full.",
		In:     []Operand{{Name: "shard", Shape: "(S)"}},
		Out:    []Operand{{Name: "full", Shape: "(W·S)", Modes: modeW}},
		Attr:   GroupAttr{},
		shares: true,
		check:  func(c *checker) { c.collective(c.in(0), c.out(0)) },
	},
	{
		Kind: ReduceScatter,
		Doc: "shard (+)= the rank's part of the sum over ranks of full, in the order that Order names; full (W·S), shard (S), f32, f64, i64, or bf16 and f16, which are added in f32 and rounded once; shard may be the rank's view of full. " +
			"In the order sequential full is f32, bf16 or f16 and shard f32, apart from it: ((old + 0) + 1) + … where it accumulates; squares i64 (Limbs), where it is there, += the exact squares of what is added of the unit's segments.",
		In:     []Operand{{Name: "full", Shape: "(W·S)", Types: isSum}},
		Out:    []Operand{{Name: "shard", Shape: "(S)", Types: isSum, Modes: modeWA}, squaresOut},
		Attr:   GroupAttr{},
		shares: true,
		check: func(c *checker) {
			if c.op.Attr.(GroupAttr).Order == SumSequential {
				c.leaves(c.out(0), c.in(0))
			} else {
				c.collective(c.out(0), c.in(0))
			}
			c.squares(c.in(0).elems(), c.op.Attr.(GroupAttr).Order)
		},
		flops: func(c *checker) int64 {
			return c.in(0).elems() - c.out(0).elems() + c.squaring(c.in(0).elems())
		},
	},
	{
		Kind: AllReduce,
		Doc:  "buf = the sum over ranks of buf, in the order that Order names, in place; f32, f64, i64, or bf16 and f16, which are added in f32 and rounded once.",
		Out:  []Operand{{Name: "buf", Shape: "(S)", Types: isSum, Modes: modeRW}},
		Attr: GroupAttr{},
		check: func(c *checker) {
			c.group()
		},
		flops: perElem,
	},
	{
		Kind:  AllToAll,
		Doc:   "recv = part i of every rank's send in rank order, on the rank with index i; send, recv (W·S) of any type, apart from each other, W the size of the group.",
		In:    []Operand{{Name: "send", Shape: "(W·S)"}},
		Out:   []Operand{{Name: "recv", Shape: "(W·S)", Modes: modeW}},
		Attr:  GroupAttr{},
		check: func(c *checker) { c.exchange(c.in(0), c.out(0)) },
	},
	{
		Kind:  Send,
		Doc:   "x goes to the rank with index To along the mesh axis, whose Recv from this one takes it; any type.",
		In:    []Operand{{Name: "x", Shape: "(…)"}},
		Attr:  PeerAttr{},
		check: func(c *checker) { c.peers() },
	},
	{
		Kind:  Recv,
		Doc:   "x = what the rank with index From along the mesh axis sends next to this one; any type.",
		Out:   []Operand{{Name: "x", Shape: "(…)", Modes: modeW}},
		Attr:  PeerAttr{},
		check: func(c *checker) { c.peers() },
	},
	{Kind: Join, Doc: "Does nothing: its waits and its event join the streams."},
	{
		Kind: Copy,
		Doc:  "dst = src; the same type and number of bytes, in any two spaces.",
		In:   []Operand{{Name: "src", Shape: "(…)"}},
		Out:  []Operand{{Name: "dst", Shape: "(…)", Modes: modeW}},
		check: func(c *checker) {
			src, dst := c.in(0), c.out(0)
			if src.buf.DType != dst.buf.DType {
				c.failf("operand dst (%s) is %v, want %v (as src)", dst.buf.Name, dst.buf.DType, src.buf.DType)
			}
			c.vector(dst, src.elems(), "as src")
		},
	},
	{
		Kind: Cast,
		Doc:  "dst (+)= src as another float type, rounded to nearest even; src, dst the same number of elements, f32, bf16 or f16.",
		In:   []Operand{{Name: "src", Shape: "(…)", Types: isFloat}},
		Out:  []Operand{{Name: "dst", Shape: "(…)", Types: isFloat, Modes: modeWA}},
		check: func(c *checker) {
			src, dst := c.in(0), c.out(0)
			if src.buf.DType == dst.buf.DType {
				c.failf("operand dst (%s) is %v, as src is; want another type (a copy or a scale moves one type)", dst.buf.Name, dst.buf.DType)
			}
			c.vector(dst, src.elems(), "as src")
		},
		flops: perElem,
	},
	{
		Kind: SumParts,
		Doc: "sum (+)= the parts of (S) that lie one after another in parts, added element by element in the order that Order names; parts (W·S) of any W from 1, " +
			"f32, bf16 or f16, which are added in f32, or f64; sum (S) f32, or f64 of f64. Accumulating, sum ((old + 0) + 1) + … where it is sequential, old + tree else. squares is ReduceScatter's, of parts of the unit's flat length.",
		In:   []Operand{{Name: "parts", Shape: "(W·S)", Types: []DType{F32, BF16, F16, F64}}},
		Out:  []Operand{{Name: "sum", Shape: "(S)", Types: []DType{F32, F64}, Modes: modeWA}, squaresOut},
		Attr: SumPartsAttr{},
		check: func(c *checker) {
			parts, sum := c.in(0), c.out(0)
			if o := c.op.Attr.(SumPartsAttr).Order; o >= NumSumOrders {
				c.failf("%v is no order of summation, want %v or %v", o, SumTree, SumSequential)
			}
			if (parts.buf.DType == F64) != (sum.buf.DType == F64) {
				c.failf("operand sum (%s) is %v of parts of %v, want f64 of f64 and f32 of all others", sum.buf.Name, sum.buf.DType, parts.buf.DType)
			}
			c.divides("the length of sum", sum.elems(), parts, "the number of elements", parts.elems())
			c.within("the number of parts", parts.elems()/max(sum.elems(), 1), MaxParts)
			c.squares(sum.elems(), c.op.Attr.(SumPartsAttr).Order)
		},
		flops: func(c *checker) int64 { return c.in(0).elems() + c.squaring(c.in(0).elems()) },
	},
	{
		Kind: Fill,
		Doc:  "dst = Value everywhere, converted to dst's type.",
		Out:  []Operand{{Name: "dst", Shape: "(…)", Modes: modeW}},
		Attr: FillAttr{},
	},
}

// squaresOut receives the exact squares of the values that a sequential sum adds.
var squaresOut = Operand{Name: "squares", Shape: "(Limbs)", Types: isI64, Modes: modeA, Optional: true}

// squares checks the output that collects the gradients' squares, if there is one. The reduction must
// add sequentially, and its buffer must have as many elements as the unit's flat parameter.
func (c *checker) squares(flat int64, order SumOrder) {
	u := c.op.Unit
	switch {
	case c.err != nil || !c.out(1).ok():
	case order != SumSequential || c.out(0).buf.DType != F32:
		c.failf("squares of what is added to %v in the order %v, want f32 and %v", c.out(0).buf.DType, order, SumSequential)
	case u < 0 || u >= len(c.p.Units) || c.p.Units[u].FlatLen != flat:
		c.failf("squares of %d elements of unit %d, want those of a unit's flat length", flat, u)
	}
}

// squaring returns the floating-point operations for n squares, 0 without such an operand.
func (c *checker) squaring(n int64) int64 {
	if !c.out(1).ok() {
		return 0
	}
	return 2 * n
}

// MaxParts is the largest number of parts that SumParts adds.
const MaxParts = 1 << 16

// group returns the number of ranks of the attribute's mesh axis.
func (c *checker) group() int64 {
	attr := c.op.Attr.(GroupAttr)
	sums := c.op.Kind == ReduceScatter || c.op.Kind == AllReduce
	switch {
	case attr.Order >= NumSumOrders:
		c.failf("%v is no order of summation, want %v or %v", attr.Order, SumTree, SumSequential)
	case !sums && attr.Order != SumTree:
		c.failf("has the order of summation %v, and sums nothing", attr.Order)
	}
	axis := attr.Axis
	if axis == -1 {
		return int64(c.p.WorldSize())
	}
	if axis < -1 || axis >= len(c.p.Mesh) {
		c.failf("mesh axis is %d, want −1 (all ranks) to %d", axis, len(c.p.Mesh)-1)
		return 1
	}
	return int64(c.p.Mesh[axis].Size)
}

// peers checks the two ranks of a Send or Recv.
func (c *checker) peers() {
	a := c.op.Attr.(PeerAttr)
	if a.Axis < 0 || a.Axis >= len(c.p.Mesh) {
		c.failf("mesh axis is %d, want 0 to %d", a.Axis, len(c.p.Mesh)-1)
		return
	}
	if n := c.p.Mesh[a.Axis].Size; min(a.From, a.To) < 0 || max(a.From, a.To) >= n || a.From == a.To {
		c.failf("goes from rank %d to rank %d of an axis of %d, want two different ones", a.From, a.To, n)
	}
}

func (c *checker) collective(shard, full ref) {
	w := c.group()
	if c.err == nil && shard.buf.DType != full.buf.DType {
		c.failf("operand full (%s) is %v, want %v (as shard)", full.buf.Name, full.buf.DType, shard.buf.DType)
	}
	if c.err == nil && full.elems() != w*shard.elems() {
		c.bad(full, "number of elements", full.elems(), w*shard.elems(), " (the shard of each of the group's ranks)")
	}
}

// leaves checks a sequential sum of the ranks' full operands.
func (c *checker) leaves(sum, full ref) {
	w := c.group()
	switch t := full.buf.DType; {
	case c.err != nil:
	case t != F32 && t != BF16 && t != F16 || sum.buf.DType != F32:
		c.failf("adds %v in %v from left to right, want f32, bf16 or f16 in f32", t, sum.buf.DType)
	case full.elems() != w*sum.elems():
		c.bad(full, "number of elements", full.elems(), w*sum.elems(), " (the shard of each of the group's ranks)")
	case c.overlap(c.op.Out[0].Buf, c.op.In[0]):
		c.failf("output shard (%s) overlaps input full (%s), from which peers read", sum.buf.Name, full.buf.Name)
	}
}

// exchange checks the send and recv operands of an all_to_all, each with one part for each rank.
func (c *checker) exchange(send, recv ref) {
	w := c.group()
	if c.err == nil && send.buf.DType != recv.buf.DType {
		c.failf("operand recv (%s) is %v, want %v (as send)", recv.buf.Name, recv.buf.DType, send.buf.DType)
	}
	if c.err == nil && send.elems()%w != 0 {
		c.failf("operand send (%s, shape %v): number of elements is %d, want a multiple of %d (a part for each of the group's ranks)", send.buf.Name, send.buf.Shape, send.elems(), w)
	}
	c.vector(recv, send.elems(), "as send")
}
