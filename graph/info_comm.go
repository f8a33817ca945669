package graph

// Collectives and memory operations. None is differentiated: rewrites add them
// to programs that have their gradients already.

func init() {
	register(
		&Info{
			Kind:   AllGather,
			Doc:    "full = the ranks' shards in rank order; shard (S), full (W·S) of any type, W the size of the group; shard may be the rank's view of full.",
			In:     []Operand{{Name: "shard", Shape: "(S)"}},
			Out:    []Operand{{Name: "full", Shape: "(W·S)", Modes: modeW}},
			Attr:   GroupAttr{},
			shares: true,
			check:  func(c *checker) { c.collective(c.in(0), c.out(0)) },
		},
		&Info{
			Kind:   ReduceScatter,
			Doc:    "shard (+)= the rank's part of the sum over ranks of full, in the fixed tree order; full (W·S), shard (S), f32, f64, i64, or bf16 and f16, which are added in f32 and rounded once; shard may be the rank's view of full.",
			In:     []Operand{{Name: "full", Shape: "(W·S)", Types: isSum}},
			Out:    []Operand{{Name: "shard", Shape: "(S)", Types: isSum, Modes: modeWA}},
			Attr:   GroupAttr{},
			shares: true,
			check:  func(c *checker) { c.collective(c.out(0), c.in(0)) },
			flops: func(c *checker) int64 {
				return c.in(0).elems() - c.out(0).elems()
			},
		},
		&Info{
			Kind: AllReduce,
			Doc:  "buf = the sum over ranks of buf, in the fixed tree order, in place; f32, f64, i64, or bf16 and f16, which are added in f32 and rounded once.",
			Out:  []Operand{{Name: "buf", Shape: "(S)", Types: isSum, Modes: modeRW}},
			Attr: GroupAttr{},
			check: func(c *checker) {
				c.group()
			},
			flops: perElem,
		},
		&Info{Kind: Join, Doc: "Does nothing: its waits and its event join the streams."},
		&Info{
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
		&Info{
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
		&Info{
			Kind: Fill,
			Doc:  "dst = Value everywhere, converted to dst's type.",
			Out:  []Operand{{Name: "dst", Shape: "(…)", Modes: modeW}},
			Attr: FillAttr{},
		},
	)
}

// group returns the number of ranks of the attribute's mesh axis.
func (c *checker) group() int64 {
	axis := c.op.Attr.(GroupAttr).Axis
	if axis == -1 {
		return int64(c.p.WorldSize())
	}
	if axis < -1 || axis >= len(c.p.Mesh) {
		c.failf("mesh axis is %d, want −1 (all ranks) to %d", axis, len(c.p.Mesh)-1)
		return 1
	}
	return int64(c.p.Mesh[axis].Size)
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
