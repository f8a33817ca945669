package inproc

import (
	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/meet"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// gather copies every rank's shard to this rank's full buffer. In place, peers
// read only their own parts of their full buffers from each other, and each
// rank writes only the parts of others in its own.
type gather struct{}

func (gather) move(k *kernel) (read, written int64) {
	size := len(k.in)
	for j := range k.m.Size() {
		i := (k.m.Rank() + j) % k.m.Size() // ranks start at different peers
		if i == k.m.Rank() && k.InPlace {
			continue
		}
		n := int64(copy(k.out[i*size:(i+1)*size], k.met(i).in))
		read, written = read+n, written+n
	}
	return read, written
}

// spread copies the root's buffer to this rank's.
type spread struct{}

func (spread) move(k *kernel) (read, written int64) {
	if k.m.Rank() == k.Sig.Root {
		return 0, 0
	}
	n := int64(copy(k.out, k.met(k.Sig.Root).out))
	return n, n
}

// exchange copies this rank's part of every rank's send buffer.
type exchange struct{}

func (exchange) move(k *kernel) (read, written int64) {
	self, w := k.m.Rank(), k.m.Size()
	size := len(k.in) / w
	for j := range w {
		i := (self + j) % w
		n := int64(copy(k.out[i*size:(i+1)*size], k.met(i).in[self*size:(self+1)*size]))
		read, written = read+n, written+n
	}
	return read, written
}

type nothing struct{}

func (nothing) move(*kernel) (read, written int64) { return 0, 0 }

// reducer sums over ranks. Each rank adds one part of the buffers: its shard of
// a reduce-scatter, which it keeps; or its share of an all-reduce, whose sum it
// stores into the buffers of all ranks. No other rank reads or writes that part,
// so both work in place.
type reducer[T comm.Number] struct {
	full  []T
	shard []T // empty for an all-reduce
	parts [][]T
	adder adder[T]
}

// adder sums over ranks in comm.Adder's order.
type adder[T comm.Number] interface {
	Sum(dst []T, srcs [][]T, accumulate bool)
	SumAll(bufs [][]T)
}

// simdAdder is comm.Adder[float32] at memory bandwidth: the same bits.
type simdAdder struct {
	one vec.SumTree
	all vec.SumTreeAll
}

// Sum adds srcs, all of dst's length, of which there is at least one.
func (a *simdAdder) Sum(dst []float32, srcs [][]float32, accumulate bool) {
	a.one = vec.SumTree{Dst: dst, Srcs: srcs, Accumulate: accumulate}
	if err := a.one.Run(nil); err != nil {
		panic(err) // CheckShards compared the lengths
	}
}

// SumAll replaces every slice of bufs by their sum.
func (a *simdAdder) SumAll(bufs [][]float32) {
	a.all = vec.SumTreeAll{Bufs: bufs}
	if err := a.all.Run(nil); err != nil {
		panic(err)
	}
}

func newReducer(m *member, dtype graph.DType, full, shard device.Ptr) (mover, error) {
	switch dtype {
	case graph.F32:
		return makeReducer[float32](m, 0, full, shard)
	case graph.F64:
		return makeReducer[float64](m, 1, full, shard)
	case graph.I64:
		return makeReducer[int64](m, 2, full, shard)
	}
	return nil, comm.CheckSum(dtype)
}

func makeReducer[T comm.Number](m *member, slot int, full, shard device.Ptr) (mover, error) {
	if m.adders[slot] == nil {
		m.adders[slot] = comm.NewAdder[T](m.Size())
	}
	r := &reducer[T]{parts: make([][]T, m.Size()), adder: m.adders[slot].(*comm.Adder[T])}
	if simd, ok := any(&simdAdder{}).(adder[T]); ok {
		r.adder = simd
	}
	var err error
	if r.full, err = cpu.Slice[T](full); err != nil {
		return nil, err
	}
	if shard.Arena != nil {
		if r.shard, err = cpu.Slice[T](shard); err != nil {
			return nil, err
		}
	}
	return r, nil
}

func (r *reducer[T]) move(k *kernel) (read, written int64) {
	w, i := len(r.parts), k.m.Rank()
	begin, end := meet.Share(int64(len(r.full)), int64(i), int64(w))
	from, to := int(begin), int(end)
	if k.Sig.Op == comm.ReduceScatter {
		from, to = i*len(r.shard), (i+1)*len(r.shard)
	}
	for j := range r.parts {
		r.parts[j] = k.met(j).mover.(*reducer[T]).full[from:to]
	}
	part := int64(to-from) * k.Sig.DType.Size()
	switch {
	case k.Sig.Op == comm.ReduceScatter && w == 1 && k.InPlace, k.Sig.Op == comm.AllReduce && w == 1:
		return 0, 0
	case k.Sig.Op == comm.ReduceScatter:
		r.adder.Sum(r.shard, r.parts, k.Sig.Accumulate)
		read, written = part*int64(w), part
		if k.Sig.Accumulate {
			read += part
		}
	default:
		r.adder.SumAll(r.parts)
		read, written = part*int64(w), part*int64(w)
	}
	return read, written
}
