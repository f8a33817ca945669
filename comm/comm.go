// Package comm defines communication between ranks for the executor: the collectives of a
// Group are kernels that are launched on a stream. Transports move the bytes, and Spillway adds
// them in one fixed order, so that a sum over ranks has the same bits on every transport.
package comm

import (
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"sync/atomic"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
)

// Group is one rank's membership in a group of ranks (a mesh axis, or all).
//
// Its methods bind an operation to memory of the rank; the kernels run when
// they are launched, on one stream, and every rank of the group must run the
// same operations in the same order. The ranks compare the sequence number and the signature
// (operation, size, dtype) of each run: if they differ, the operation fails on every rank.
//
// When a kernel has run, its outputs are complete and no peer reads its inputs any more. If a rank
// does not arrive within the timeout, the operation fails on every rank with an error that names
// it. An error on any rank that is passed to Abort also makes the operation fail on every rank.
// After the first error every operation of the group fails with that error.
//
// Below, W is the group's size, i the index of a rank in the group and S the bytes of a
// rank's shard.
type Group interface {
	// Rank returns the index of the rank in the group, Size the group's size.
	Rank() int
	Size() int

	// AllGather copies shard (S) of each rank i to full[i·S : (i+1)·S] of every
	// rank. shard may be the rank's own part of full.
	AllGather(label string, shard, full device.Ptr, dtype graph.DType) (device.Kernel, error)
	// ReduceScatter sums full (W·S) over the ranks, in the given order, and gives
	// rank i the part [i·S, (i+1)·S) in shard, which it overwrites or, if accumulate,
	// adds to. shard may be the rank's own part of full, unless accumulating. f32, f64,
	// i64; bf16 and f16 are added in f32 and rounded once.
	//
	// In the order SumSequential full has the given dtype, f32, bf16 or f16; shard is f32
	// and must not overlap full. The ranks' parts are added one after the other, to shard if
	// accumulate. from lists the ranks, in order, whose parts are added; empty means all.
	// Other ranks take part in the operation but contribute nothing.
	ReduceScatter(label string, full, shard device.Ptr, dtype graph.DType, order graph.SumOrder, accumulate bool, from ...int) (device.Kernel, error)
	// ReduceLeaves does the same as ReduceScatter in the order SumSequential. It also adds the
	// squares of the addends to an exact accumulator of the rank. Only CPU transports implement it;
	// others return ErrNoSquares.
	ReduceLeaves(label string, full, shard device.Ptr, dtype graph.DType, accumulate bool, squares Squares, from ...int) (device.Kernel, error)
	// AllReduce replaces buf by its sum over the ranks, in the order SumTree. It supports the types
	// of ReduceScatter.
	AllReduce(label string, buf device.Ptr, dtype graph.DType, order graph.SumOrder) (device.Kernel, error)
	// Broadcast copies the root's buf to every rank's.
	Broadcast(label string, buf device.Ptr, dtype graph.DType, root int) (device.Kernel, error)
	// AllToAll copies part i of each rank j's send (W·S) to part j of rank i's
	// recv (W·S). They must not overlap.
	AllToAll(label string, send, recv device.Ptr, dtype graph.DType) (device.Kernel, error)
	// Send returns when rank `to` has copied buf with its matching Recv: the k-th Send of a pair
	// matches the k-th Recv. Two ranks that send to each other first and receive second wait for
	// each other until the timeout.
	Send(label string, buf device.Ptr, dtype graph.DType, to int) (device.Kernel, error)
	Recv(label string, buf device.Ptr, dtype graph.DType, from int) (device.Kernel, error)
	// Barrier returns when every rank has arrived at it.
	Barrier(label string) (device.Kernel, error)

	// Abort makes every operation that waits or follows fail with err, on all
	// ranks of the job. The first call counts. Any goroutine may call it.
	Abort(err error)
	// OnError registers f to be called once with the error that ends the group,
	// so that a rank which is waiting for something other than a peer learns of it. f runs
	// on any goroutine, and may call only Abort and Err.
	OnError(f func(error))
	// Err returns the error that ended the group, nil if there has been none.
	Err() error
	// Stats returns the rank's traffic so far. Any goroutine may call it.
	Stats() Stats
}

// Squares selects the accumulator for the squares of a sum's addends.
type Squares struct {
	Acc device.Ptr // I64 (exact.Limbs); the zero Ptr: squares are not accumulated
	// Spans are the ranges [lo, hi) of the shard whose elements are included, in ascending
	// order. Each begins at a multiple of 256 elements.
	Spans [][2]int
}

// ErrNoSquares is returned by ReduceLeaves of a transport that does not add on the CPU.
var ErrNoSquares = errors.New("squares of what is added are the CPU's alone")

// ChunkBytes is the size of the chunks in which a sum receives each rank's part, on
// transports without shared memory. While one chunk is added the next one is in transit.
const ChunkBytes = 1 << 20

// Op is the name of an operation of a Group in errors and signatures.
type Op string

// Operations of a Group.
const (
	AllGather     Op = "all_gather"
	ReduceScatter Op = "reduce_scatter"
	AllReduce     Op = "all_reduce"
	Broadcast     Op = "broadcast"
	AllToAll      Op = "all_to_all"
	SendRecv      Op = "send_recv"
	Barrier       Op = "barrier"
)

// Signature holds the properties of an operation's run that must be equal on every rank.
type Signature struct {
	Op         Op
	Bytes      int64 // size of the full buffer: W·S, or S if the operation has no shards
	DType      graph.DType
	Root       int            // root of a broadcast
	Order      graph.SumOrder // order of the sum of a reduce-scatter or all-reduce
	Accumulate bool           // whether a reduce-scatter accumulates
	Round      string         // algorithm and number of a round; "": the complete operation
}

// Hash returns a hash of the signature: equal signatures have equal hashes.
func (s Signature) Hash() uint64 {
	h := fnv.New64a()
	fmt.Fprintf(h, "%s %d %d %d %d %v %s", s.Op, s.Bytes, s.DType, s.Root, s.Order, s.Accumulate, s.Round)
	return h.Sum64()
}

func (s Signature) String() string {
	if s.Op == Barrier {
		return string(s.Op)
	}
	t := fmt.Sprintf("%s of %d bytes of %s", s.Op, s.Bytes, s.DType)
	if s.Op == Broadcast {
		t += fmt.Sprintf(" from rank %d", s.Root)
	}
	if s.Order != graph.SumTree {
		t += fmt.Sprintf(" in the order %s", s.Order)
	}
	if s.Accumulate {
		t += ", accumulating"
	}
	return t
}

// Kinds of errors that end a group. Errors wrap one of them, and Abort's cause.
var (
	ErrTimeout  = errors.New("timeout")
	ErrMismatch = errors.New("ranks disagree")
	ErrAborted  = errors.New("aborted")
	ErrLost     = errors.New("rank lost") // its process died, or ended before the others
)

// Stats counts the operations and bytes of one rank.
type Stats struct {
	// Calls is the number of operations that have run.
	Calls int64
	// Sent is ring-equivalent bytes: buffer × (W−1)/W for a gather or scatter,
	// twice that for an all-reduce, buffer for a send. Buffers of i64 and f64 are not counted,
	// because they hold losses, counts and exact norms, not tensors. The counts of a group's
	// ranks add up to the total without rounding errors.
	Sent int64
	// Read and Written are the bytes that the rank actually loaded and stored.
	Read, Written int64
}

// Sub returns the traffic between the snapshots earlier and s.
func (s Stats) Sub(earlier Stats) Stats {
	return Stats{s.Calls - earlier.Calls, s.Sent - earlier.Sent, s.Read - earlier.Read, s.Written - earlier.Written}
}

// Counter is a Stats that one goroutine writes and any goroutine may read.
type Counter struct{ calls, sent, read, written atomic.Int64 }

// Add adds one run of an operation.
func (c *Counter) Add(sent, read, written int64) {
	c.calls.Add(1)
	c.sent.Add(sent)
	c.read.Add(read)
	c.written.Add(written)
}

// Stats returns the counts.
func (c *Counter) Stats() Stats {
	return Stats{c.calls.Load(), c.sent.Load(), c.read.Load(), c.written.Load()}
}

// RingBytes returns the bytes that one rank of a group of size ranks would send for a collective
// with a ring algorithm: see Stats.Sent.
func RingBytes(s Signature, rank, size int) int64 {
	w, r := int64(size), int64(rank)
	var total int64 // bytes that all ranks send
	if s.DType == graph.I64 || s.DType == graph.F64 {
		return 0
	}
	switch s.Op {
	case AllGather, ReduceScatter, AllToAll, Broadcast:
		total = s.Bytes * (w - 1)
	case AllReduce:
		total = 2 * s.Bytes * (w - 1)
	default:
		return 0
	}
	// A rank's bytes are a difference of rounded partial sums, so all ranks' bytes add up to total
	// exactly.
	q, m := total/w, total%w
	return q + (m*(r+1))/w - (m*r)/w
}

// Coord returns rank's index along each axis of mesh; the last varies fastest.
func Coord(mesh []graph.Axis, rank int) []int {
	c := make([]int, len(mesh))
	for i := len(mesh) - 1; i >= 0; i-- {
		c[i] = rank % mesh[i].Size
		rank /= mesh[i].Size
	}
	return c
}

// Members returns the ranks of rank's group along an axis of mesh, −1 for all.
func Members(mesh []graph.Axis, rank, axis int) []int {
	stride, size := 1, 1
	for i := len(mesh) - 1; i >= 0; i-- {
		if i == axis {
			stride = size
		}
		size *= mesh[i].Size
	}
	first, n := 0, size
	if axis >= 0 {
		n = mesh[axis].Size
		first = rank - rank/stride%n*stride
	}
	list := make([]int, n)
	for i := range list {
		list[i] = first + i*stride
	}
	return list
}

// CheckSum returns an error unless reductions add elements of dtype.
func CheckSum(dtype graph.DType) error {
	switch dtype {
	case graph.F32, graph.F64, graph.I64, graph.BF16, graph.F16:
		return nil
	}
	return fmt.Errorf("no sum of %s, want f32, f64, i64, bf16 or f16", dtype)
}

// CheckOrder returns an error unless an all-reduce supports the order. Every transport must
// give the same bits as Adder.
func CheckOrder(order graph.SumOrder) error {
	if order != graph.SumTree {
		return fmt.Errorf("no sum in the order %s, want %s", order, graph.SumTree)
	}
	return nil
}

// CheckScatter returns an error unless a reduce-scatter supports dtype and order, and its
// operands meet the requirements of Group.ReduceScatter.
func CheckScatter(full, shard device.Ptr, dtype graph.DType, rank, size int, order graph.SumOrder, accumulate bool) error {
	switch {
	case order == graph.SumTree:
		return CheckShards(full, shard, dtype, rank, size, accumulate)
	case order != graph.SumSequential:
		return fmt.Errorf("no sum in the order %s, want %s or %s", order, graph.SumTree, graph.SumSequential)
	case dtype != graph.F32 && dtype != graph.BF16 && dtype != graph.F16:
		return fmt.Errorf("no sum of %s in the order %s, want f32, bf16 or f16", dtype, order)
	}
	if err := full.Check(); err != nil {
		return fmt.Errorf("full buffer: %w", err)
	}
	if err := shard.Check(); err != nil {
		return fmt.Errorf("shard: %w", err)
	}
	wide, each := graph.F32.Size(), dtype.Size()
	switch {
	case shard.Len%wide != 0 || full.Len != shard.Len/wide*each*int64(size):
		return fmt.Errorf("the full buffer has %d bytes of %s, want %d ranks × the elements of the shard, which has %d bytes of f32", full.Len, dtype, size, shard.Len)
	case shard.Overlaps(full):
		return fmt.Errorf("the shard lies in the full buffer, want them apart")
	}
	return nil
}

// CheckFrom returns an error unless a reduce-scatter in this order can add the parts of
// only the ranks in from.
func CheckFrom(from []int, size int, order graph.SumOrder) error {
	switch {
	case len(from) == 0:
		return nil
	case order != graph.SumSequential:
		return fmt.Errorf("a sum of %d of %d ranks in the order %s, want %s", len(from), size, order, graph.SumSequential)
	case !slices.IsSorted(from) || from[0] < 0 || from[len(from)-1] >= size || len(slices.Compact(slices.Clone(from))) != len(from):
		return fmt.Errorf("a sum of ranks %v, want different ones of %d in order", from, size)
	}
	return nil
}

// CheckShards returns an error unless full holds size shards, each a whole
// number of elements, and shard either does not overlap full or is exactly the rank's part
// of it. If apart is set, shard must not overlap full. The device checks the ranges.
func CheckShards(full, shard device.Ptr, dtype graph.DType, rank, size int, apart bool) error {
	if err := full.Check(); err != nil {
		return fmt.Errorf("full buffer: %w", err)
	}
	if err := shard.Check(); err != nil {
		return fmt.Errorf("shard: %w", err)
	}
	switch {
	case full.Len != shard.Len*int64(size):
		return fmt.Errorf("the full buffer has %d bytes, want %d ranks × the shard's %d", full.Len, size, shard.Len)
	case shard.Len%dtype.Size() != 0:
		return fmt.Errorf("a shard of %d bytes is not a whole number of %s elements", shard.Len, dtype)
	case !shard.Overlaps(full):
		return nil
	case apart:
		return fmt.Errorf("the shard lies in the full buffer, want them apart")
	case shard.Off != full.Off+int64(rank)*shard.Len:
		return fmt.Errorf("the shard at byte %d of the full buffer is not the part of rank %d, at byte %d",
			shard.Off-full.Off, rank, int64(rank)*shard.Len)
	}
	return nil
}

// CheckBuffer returns an error unless buf is a whole number of elements.
func CheckBuffer(buf device.Ptr, dtype graph.DType) error {
	if err := buf.Check(); err != nil {
		return fmt.Errorf("buffer: %w", err)
	}
	if buf.Len%dtype.Size() != 0 {
		return fmt.Errorf("a buffer of %d bytes is not a whole number of %s elements", buf.Len, dtype)
	}
	return nil
}
