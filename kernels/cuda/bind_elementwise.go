package cuda

import "github.com/spillway-ml/spillway/graph"

func init() {
	register(map[graph.Kind]binder{
		graph.Add: func(b *binding) { b.binary("add") },
		graph.Sub: func(b *binding) { b.binary("sub") },
		graph.Mul: func(b *binding) { b.binary("mul") },
	})
}

const elementwise = "elementwise.cu"

// perThread is the elements that a thread of an elementwise kernel takes at a
// time: 16 bytes of them.
func perThread(buf *graph.Buffer) int64 { return 16 / buf.DType.Size() }

func (b *binding) binary(name string) {
	y := b.outBuf(0)
	b.over(elementwise, name+"_"+b.float(y), y.Elems(), perThread(y),
		b.args().Pointer(b.in(0)).Pointer(b.in(1)).Pointer(b.out(0)).Int64(y.Elems()).Int32(b.accum(0)))
}
