// Package direct implements collectives between CPU ranks that can access each other's
// memory: it copies and adds, and reads and writes every byte once.
package direct

import (
	"cmp"
	"unsafe"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// Operands is the memory of a rank's operands as mapped in this process. It is nil for an
// operand that the operation does not have.
type Operands struct{ In, Out []byte }

// Mover does one rank's part of one bound operation.
type Mover struct {
	// Peers holds the operands of all ranks by index in the group, this rank included. For
	// a Send or Recv it holds the sender's, then the receiver's. The transport sets it.
	Peers []Operands

	call comm.Call
	rank int
	move func(*Mover) (read, written int64)
}

// New returns the Mover of an operation for the rank with the given index in a group of
// size ranks, and the memory of the rank's operands. Memory that the CPU cannot access and
// sums of unsupported dtypes are errors.
func New(c comm.Call, rank, size int) (*Mover, Operands, error) {
	m := &Mover{Peers: make([]Operands, size), call: c, rank: rank}
	var own Operands
	for _, x := range []struct {
		p   device.Ptr
		mem *[]byte
	}{{c.In, &own.In}, {c.Out, &own.Out}} {
		if x.p.Arena == nil {
			continue
		}
		b, err := cpu.Bytes(x.p)
		if err != nil {
			return nil, own, err
		}
		*x.mem = b
	}
	if c.Round != nil {
		err := m.bindRound()
		return m, own, err
	}
	var err error
	switch c.Sig.Op {
	case comm.AllGather:
		m.move = gather
	case comm.ReduceScatter, comm.AllReduce:
		m.move, err = newReducer(c, size)
	case comm.Broadcast:
		m.move = spread
	case comm.AllToAll:
		m.move = exchange
	case comm.SendRecv:
		m.move = receive
	case comm.Barrier:
		m.move = func(*Mover) (int64, int64) { return 0, 0 }
	}
	return m, own, err
}

// Move does this rank's part of the operation and returns the bytes that it loaded and
// stored. Every rank must have arrived at the operation. Move allocates nothing.
func (m *Mover) Move() (read, written int64) { return m.move(m) }

// gather copies every rank's shard to this rank's full buffer. In place, peers
// read only their own parts of their full buffers from each other, and each
// rank writes only the parts of others in its own.
func gather(m *Mover) (read, written int64) {
	own, w := m.Peers[m.rank], len(m.Peers)
	size := len(own.In)
	for j := range w {
		i := (m.rank + j) % w // each rank starts at a different peer, to spread the load
		if i == m.rank && m.call.InPlace {
			continue
		}
		n := int64(copy(own.Out[i*size:(i+1)*size], m.Peers[i].In))
		read, written = read+n, written+n
	}
	return read, written
}

// spread copies the root's buffer into this rank's buffer (broadcast).
func spread(m *Mover) (read, written int64) {
	if m.rank == m.call.Sig.Root {
		return 0, 0
	}
	n := int64(copy(m.Peers[m.rank].Out, m.Peers[m.call.Sig.Root].Out))
	return n, n
}

// exchange copies this rank's part of every rank's send buffer (all-to-all).
func exchange(m *Mover) (read, written int64) {
	self, w := m.rank, len(m.Peers)
	out := m.Peers[self].Out
	size := len(out) / w
	for j := range w {
		i := (self + j) % w
		n := int64(copy(out[i*size:(i+1)*size], m.Peers[i].In[self*size:(self+1)*size]))
		read, written = read+n, written+n
	}
	return read, written
}

// receive copies the sender's buffer; the sender has nothing to do.
func receive(m *Mover) (read, written int64) {
	if m.call.Sends() {
		return 0, 0
	}
	n := int64(copy(m.Peers[1].Out, m.Peers[0].In))
	return n, n
}

// word is an element that a sum reads: a number, or the bits of a 16-bit float.
type word interface{ comm.Number | uint16 }

// adder sums over ranks in comm.Adder's order.
type adder[T word] interface {
	Sum(dst []T, srcs [][]T, accumulate bool)
	SumAll(bufs [][]T)
}

// simdAdder gives the same bits as comm.Adder[float32] and runs at memory bandwidth.
type simdAdder struct {
	one vec.SumTree
	all vec.SumTreeAll
}

// Sum writes the sum of srcs to dst. srcs has at least one element; all have dst's length.
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

// halfAdder adds 16-bit floats in float32, in comm.Adder's order, and rounds the
// sum once.
type halfAdder struct{ k vec.HalfSumTree }

// Sum is like simdAdder.Sum.
func (a *halfAdder) Sum(dst []uint16, srcs [][]uint16, accumulate bool) {
	a.k.Dst, a.k.Srcs, a.k.Accumulate, a.k.All = dst, srcs, accumulate, false
	if err := a.k.Run(nil); err != nil {
		panic(err) // CheckShards compared the lengths
	}
}

// SumAll is like simdAdder.SumAll.
func (a *halfAdder) SumAll(bufs [][]uint16) {
	a.k.Srcs, a.k.All = bufs, true
	if err := a.k.Run(nil); err != nil {
		panic(err)
	}
}

// reducer sums over ranks. Each rank adds one part of the buffers: its shard of
// a reduce-scatter, which it keeps; or its share of an all-reduce, whose sum it
// stores into the buffers of all ranks. No other rank reads or writes that part,
// so both work in place.
type reducer struct {
	adder *Adder
	parts [][]byte // scratch, by rank
}

func newReducer(c comm.Call, size int) (func(*Mover) (int64, int64), error) {
	a, err := NewAdder(c.Sig.DType, c.Sig.Order, size)
	if err != nil {
		return nil, err
	}
	sum := c.Sig.DType
	if c.Sig.Order == graph.SumSequential {
		sum = graph.F32
	}
	if err := cmp.Or(checkElements(c.In, c.Sig.DType), checkElements(c.Out, sum), a.Square(c.Squares)); err != nil {
		return nil, err
	}
	r := &reducer{adder: a, parts: make([][]byte, size)}
	if c.Sig.Op == comm.ReduceScatter {
		return r.scatter, nil
	}
	return r.all, nil
}

// checkElements returns an error unless the CPU can access an operand as elements of dtype.
func checkElements(p device.Ptr, dtype graph.DType) (err error) {
	if p.Arena == nil {
		return nil
	}
	switch dtype {
	case graph.F32:
		_, err = cpu.Slice[float32](p)
	case graph.F64:
		_, err = cpu.Slice[float64](p)
	case graph.I64:
		_, err = cpu.Slice[int64](p)
	default:
		_, err = cpu.Slice[uint16](p)
	}
	return err
}

// Adder sums buffers of a dtype in comm.Adder's order. It is for one goroutine.
type Adder struct {
	sum     func(dst []byte, srcs [][]byte, accumulate bool)
	sumAll  func(bufs [][]byte) // not of a sequential sum
	squares *vec.Squares        // accumulates the squares of a sequential sum's addends; nil: none
}

// Square makes sequential sums also accumulate the squares of their addends, if s says where.
func (a *Adder) Square(s comm.Squares) (err error) {
	if s.Acc.Arena == nil {
		return nil
	}
	for _, span := range s.Spans {
		a.squares.Spans = append(a.squares.Spans, vec.Range{Lo: span[0], Hi: span[1]})
	}
	a.squares.Acc, err = cpu.Slice[int64](s.Acc)
	return err
}

// At is Sum for a part of a shard that starts at element at, as the spans of the squares
// count elements.
func (a *Adder) At(at int, dst []byte, srcs [][]byte, accumulate bool) {
	if a.squares != nil {
		a.squares.At = at
	}
	a.Sum(dst, srcs, accumulate)
}

// NewAdder returns an Adder for up to size buffers that adds in the given order. In the
// order SumSequential dst is always f32 and must not overlap the sources.
func NewAdder(dtype graph.DType, order graph.SumOrder, size int) (*Adder, error) {
	if order == graph.SumSequential {
		k := &leafAdder{}
		if err := k.of(dtype); err != nil {
			return nil, err
		}
		k.k.Squares = &vec.Squares{}
		return &Adder{sum: k.sum, squares: k.k.Squares}, nil
	}
	switch dtype {
	case graph.F32:
		return bytesAdder(&simdAdder{}, size), nil
	case graph.F64:
		return bytesAdder(comm.NewAdder[float64](size), size), nil
	case graph.I64:
		return bytesAdder(comm.NewAdder[int64](size), size), nil
	case graph.BF16:
		return bytesAdder(&halfAdder{vec.HalfSumTree{As: vec.BF16}}, size), nil
	case graph.F16:
		return bytesAdder(&halfAdder{vec.HalfSumTree{As: vec.F16}}, size), nil
	}
	return nil, comm.CheckSum(dtype)
}

func bytesAdder[T word](a adder[T], size int) *Adder {
	parts := make([][]T, 0, size)
	of := func(bufs [][]byte) [][]T {
		parts = parts[:0]
		for _, b := range bufs {
			parts = append(parts, elements[T](b))
		}
		return parts
	}
	return &Adder{
		sum: func(dst []byte, srcs [][]byte, accumulate bool) {
			a.Sum(elements[T](dst), of(srcs), accumulate)
		},
		sumAll: func(bufs [][]byte) { a.SumAll(of(bufs)) },
	}
}

// Sum writes the sum of srcs to dst, or adds it to dst. All have the same number of
// elements, aligned to the dtype. In the order SumTree dst may be one of srcs.
func (a *Adder) Sum(dst []byte, srcs [][]byte, accumulate bool) {
	if len(dst) > 0 {
		a.sum(dst, srcs, accumulate)
	}
}

// elements returns b as a slice of T. cpu.Slice has checked the alignment and length in
// the process that owns the operand.
func elements[T word](b []byte) []T {
	if len(b) == 0 {
		return nil
	}
	var zero T
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/int(unsafe.Sizeof(zero)))
}

func (r *reducer) scatter(m *Mover) (read, written int64) {
	w := len(m.Peers)
	if w == 1 && m.call.InPlace {
		return 0, 0
	}
	part := int(m.call.Sig.Bytes) / w // the sum is longer if 16-bit elements have an f32 one
	for j := range r.parts {
		r.parts[j] = m.Peers[j].In[m.rank*part:][:part]
	}
	sum := m.Peers[m.rank].Out
	r.adder.Sum(sum, comm.Addends(&m.call, r.parts), m.call.Sig.Accumulate)
	read, written = int64(part*w), int64(len(sum))
	if m.call.Sig.Accumulate {
		read += written
	}
	return read, written
}

func (r *reducer) all(m *Mover) (read, written int64) {
	w, size := int64(len(m.Peers)), m.call.Sig.DType.Size()
	from, to := comm.Share(int64(len(m.Peers[m.rank].Out))/size, int64(m.rank), w)
	if w == 1 || from == to {
		return 0, 0
	}
	for j := range r.parts {
		r.parts[j] = m.Peers[j].Out[from*size : to*size]
	}
	r.adder.sumAll(r.parts)
	part := (to - from) * size
	return part * w, part * w
}
