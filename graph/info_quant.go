package graph

// Quantisation, for storage and communication. These operations have no derivative, because
// rewrites add them after differentiation.

var packedCodes = Operand{Name: "q", Shape: "(Parts·(Len+4·Len/Block))", Types: []DType{U8}}

var quantKinds = []*Info{
	{
		Kind:  Quantize,
		Doc:   "q = the int8 codes and f32 scales of x, symmetric, a scale for every Block; x (Len) in Parts parts, f32, bf16 or f16.",
		In:    []Operand{in("x", "(Len)")},
		Out:   []Operand{packedCodes.mode(modeW)},
		Attr:  QuantAttr{},
		check: func(c *checker) { c.quantised(c.in(0), c.out(0), false) },
		flops: func(c *checker) int64 { return 4 * c.in(0).elems() },
	},
	{
		Kind:  Dequantize,
		Doc:   "x = code·scale, rounded once; the parts of q one behind the other; x (Len), f32, bf16 or f16.",
		In:    []Operand{packedCodes},
		Out:   []Operand{out("x", "(Len)")},
		Attr:  QuantAttr{},
		check: func(c *checker) { c.quantised(c.out(0), c.in(0), false) },
		flops: perElem,
	},
	{
		Kind: DequantizeSum,
		Doc:  "x (+)= the sum over the parts of q of code·scale, in f32 in the order that Order names, rounded once (sequential and accumulating, ((x + 0) + 1) + …); each part and x (Len), f32, bf16 or f16. squares is ReduceScatter's, of all that is read: padding has code 0.",
		In:   []Operand{packedCodes},
		Out:  []Operand{acc("x", "(Len)"), squaresOut},
		Attr: QuantAttr{},
		check: func(c *checker) {
			c.quantised(c.out(0), c.in(0), true)
			a := c.op.Attr.(QuantAttr)
			c.squares(a.Parts*c.out(0).elems(), a.Order)
			if c.out(1).ok() && a.Block != QuantBlock {
				c.failf("squares of values in blocks of %d, want %d", a.Block, QuantBlock)
			}
		},
		flops: func(c *checker) int64 {
			n := c.op.Attr.(QuantAttr).Parts * c.out(0).elems()
			return 2*n + c.squaring(n)
		},
	},
}

// quantised checks values x against their codes and scales q. If each is set, every part of q has
// as many values as x, since parts are summed; otherwise x is divided into the parts.
func (c *checker) quantised(x, q ref, each bool) {
	a := c.op.Attr.(QuantAttr)
	switch {
	case a.Order >= NumSumOrders:
		c.failf("%v is no order of summation, want %v or %v", a.Order, SumTree, SumSequential)
	case !each && a.Order != SumTree:
		c.failf("has the order of summation %v, and sums nothing", a.Order)
	}
	c.within("Block", a.Block, 1<<24)
	c.within("Parts", a.Parts, 1<<24)
	if c.err != nil {
		return
	}
	n := x.elems()
	if !each {
		if n%a.Parts != 0 {
			c.failf("operand %s (%s): number of elements is %d, want a multiple of Parts %d", x.name, x.buf.Name, n, a.Parts)
			return
		}
		n /= a.Parts
	}
	if n%a.Block != 0 {
		c.failf("operand %s (%s): number of elements of a part is %d, want a multiple of Block %d", x.name, x.buf.Name, n, a.Block)
	}
	c.vector(q, a.Bytes(n), "codes and scales of each part")
	if a.Shard.Len != 0 {
		c.shard(a.Shard)
		c.vector(x, a.Shard.Len, "the shard's Len")
		if c.err == nil && a.Block != QuantBlock {
			c.failf("Block is %d, want %d for a unit's values", a.Block, QuantBlock)
		}
	}
}
