package graph

import "slices"

// Cost estimates one execution on one rank. It returns floating-point operations (a multiply-add
// counts 2, a transcendental function 8) and bytes of memory read and written. Each operand counts
// once; repeated reads inside a kernel do not count. For collectives, bytes is the traffic in the
// rank's own memory, not on a link. The operation must pass Check.
func Cost(p *Program, op *Op) (flops, bytes int64) {
	in, ok := op.Info()
	if !ok {
		return 0, 0
	}
	c := &checker{p: p, op: op, info: in}
	c.inOps, c.outOps = in.Operands(op.Attr)
	if in.flops != nil {
		flops = in.flops(c)
	}
	if in.bytes != nil {
		return flops, in.bytes(c)
	}
	for _, id := range op.In {
		if id != NoBuf {
			bytes += p.Buffers[id].Bytes()
		}
	}
	for _, o := range op.Out {
		if o.Buf == NoBuf {
			continue
		}
		n := p.Buffers[o.Buf].Bytes()
		bytes += n
		if o.Mode != Write && !slices.Contains(op.In, o.Buf) {
			bytes += n
		}
	}
	return flops, bytes
}
