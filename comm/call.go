package comm

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
)

// Call is an operation of a Group with its operands. The operands have been checked, except
// that the transport must check their memory and, for a sum, whether it can add the dtype.
type Call struct {
	Sig  Signature
	Name string // for errors and traces
	// In and Out are the operands; the zero Ptr means that there is none. Operations in
	// place and Recv have only Out; Send has only In.
	In, Out device.Ptr
	InPlace bool    // the shard is the rank's part of the full buffer
	Peer    int     // the other rank of a Send or Recv
	From    []int   // ranks whose parts a reduce-scatter adds, in order; empty: all ranks
	Round   Round   // one round of an algorithm, applied to Out; nil: a complete operation
	Sent    int64   // increase of Stats.Sent in one run
	Squares Squares // accumulator of the squares of a reduce-scatter's addends

	touches []device.Ptr
}

// Label returns the name for errors and traces.
func (c *Call) Label() string { return c.Name }

// Touches returns the operands.
func (c *Call) Touches() []device.Ptr { return c.touches }

// Addends returns the ranks' elements that a reduce-scatter adds (c.From). It moves them to the
// front of all, which has an element for each rank.
func Addends[T any](c *Call, all []T) []T {
	if len(c.From) == 0 {
		return all
	}
	for i, rank := range c.From { // ascending, so rank >= i and no needed element is overwritten
		all[i] = all[rank]
	}
	return all[:len(c.From)]
}

// Sends tells whether the call is a Send rather than a Recv.
func (c *Call) Sends() bool { return c.Sig.Op == SendRecv && c.Out.Arena == nil }

// Caller is the part of a Group that all transports share: it checks the operands of an operation
// and passes it to Bind.
type Caller struct {
	Index int // the rank's index in the group
	Ranks int // the group's size
	World int // the rank's index in the world, for errors
	// Bind makes the kernel of an operation.
	Bind func(Call) (device.Kernel, error)
}

// Rank returns the rank's index in the group.
func (c *Caller) Rank() int { return c.Index }

// Size returns the group's size.
func (c *Caller) Size() int { return c.Ranks }

// GlobalRank returns the rank in the world.
func (c *Caller) GlobalRank() int { return c.World }

func (c *Caller) bind(label string, wrong error, call Call) (device.Kernel, error) {
	call.Name = label
	for _, p := range []device.Ptr{call.In, call.Out, call.Squares.Acc} {
		if p.Arena != nil {
			call.touches = append(call.touches, p)
		}
	}
	call.Sent = RingBytes(call.Sig, c.Index, c.Ranks)
	if call.Sends() {
		call.Sent = call.Sig.Bytes
	}
	if call.Round != nil {
		call.Sent = 0 // bytes are counted once, for the complete operation
	}
	call.InPlace = call.In.Overlaps(call.Out)
	if wrong == nil {
		var k device.Kernel
		if k, wrong = c.Bind(call); wrong == nil {
			return k, nil
		}
	}
	return nil, fmt.Errorf("rank %d: %s %q: %w", c.World, call.Sig.Op, label, wrong)
}

// AllGather binds a gather of shards.
func (c *Caller) AllGather(label string, shard, full device.Ptr, dtype graph.DType) (device.Kernel, error) {
	return c.bind(label, CheckShards(full, shard, dtype, c.Index, c.Ranks, false),
		Call{Sig: Signature{Op: AllGather, Bytes: full.Len, DType: dtype}, In: shard, Out: full})
}

// ReduceScatter binds a sum of the rank's part over the ranks.
func (c *Caller) ReduceScatter(label string, full, shard device.Ptr, dtype graph.DType, order graph.SumOrder, accumulate bool, from ...int) (device.Kernel, error) {
	return c.scatter(label, full, shard, Signature{DType: dtype, Order: order, Accumulate: accumulate}, Squares{}, from)
}

// ReduceLeaves binds a sum of the rank's part over the ranks, from left to right, and the sum of
// the squares of its addends.
func (c *Caller) ReduceLeaves(label string, full, shard device.Ptr, dtype graph.DType, accumulate bool, squares Squares, from ...int) (device.Kernel, error) {
	return c.scatter(label, full, shard, Signature{DType: dtype, Order: graph.SumSequential, Accumulate: accumulate}, squares, from)
}

func (c *Caller) scatter(label string, full, shard device.Ptr, sig Signature, squares Squares, from []int) (device.Kernel, error) {
	sig.Op, sig.Bytes = ReduceScatter, full.Len
	return c.bind(label, cmp.Or(CheckScatter(full, shard, sig.DType, c.Index, c.Ranks, sig.Order, sig.Accumulate), CheckFrom(from, c.Ranks, sig.Order)),
		Call{From: from, Sig: sig, In: full, Out: shard, Squares: squares})
}

// AllReduce binds a sum in place.
func (c *Caller) AllReduce(label string, buf device.Ptr, dtype graph.DType, order graph.SumOrder) (device.Kernel, error) {
	return c.bind(label, cmp.Or(CheckOrder(order), CheckBuffer(buf, dtype)),
		Call{Sig: Signature{Op: AllReduce, Bytes: buf.Len, DType: dtype, Order: order}, Out: buf})
}

// Broadcast binds a copy of the root's buffer.
func (c *Caller) Broadcast(label string, buf device.Ptr, dtype graph.DType, root int) (device.Kernel, error) {
	err := CheckBuffer(buf, dtype)
	if err == nil && (root < 0 || root >= c.Ranks) {
		err = fmt.Errorf("root %d of %d ranks", root, c.Ranks)
	}
	return c.bind(label, err, Call{Sig: Signature{Op: Broadcast, Bytes: buf.Len, DType: dtype, Root: root}, Out: buf})
}

// AllToAll binds an exchange of parts.
func (c *Caller) AllToAll(label string, send, recv device.Ptr, dtype graph.DType) (device.Kernel, error) {
	part := device.Ptr{Arena: recv.Arena, Off: recv.Off, Len: recv.Len / int64(c.Ranks)}
	err := CheckShards(send, part, dtype, c.Index, c.Ranks, true)
	if err == nil && (recv.Len != send.Len || recv.Overlaps(send)) {
		err = errors.New("want buffers of one length that lie apart")
	}
	return c.bind(label, err, Call{Sig: Signature{Op: AllToAll, Bytes: send.Len, DType: dtype}, In: send, Out: recv})
}

// Send binds a transfer of buf to a peer's Recv.
func (c *Caller) Send(label string, buf device.Ptr, dtype graph.DType, to int) (device.Kernel, error) {
	return c.point(label, Call{In: buf, Peer: to}, buf, dtype)
}

// Recv binds the receipt of the buffer of a peer's Send.
func (c *Caller) Recv(label string, buf device.Ptr, dtype graph.DType, from int) (device.Kernel, error) {
	return c.point(label, Call{Out: buf, Peer: from}, buf, dtype)
}

func (c *Caller) point(label string, call Call, buf device.Ptr, dtype graph.DType) (device.Kernel, error) {
	call.Sig = Signature{Op: SendRecv, Bytes: buf.Len, DType: dtype}
	err := CheckBuffer(buf, dtype)
	if err == nil && (call.Peer < 0 || call.Peer >= c.Ranks || call.Peer == c.Index) {
		err = fmt.Errorf("the peer of rank %d is %d, want another of %d ranks", c.Index, call.Peer, c.Ranks)
	}
	return c.bind(label, err, call)
}

// Move replaces elements [At, At+Len) of a rank's vector by a sum. It adds the same elements of the
// ranks in From, in that order, with their values before the round. With one rank in From it is a
// copy.
type Move struct {
	At, Len int64
	From    []int
}

// Round holds the moves of every rank of a group in one round of an algorithm, by index.
// No rank may read elements that another rank writes in the same round.
type Round [][]Move

// Round binds one round of an operation to the rank's vector. Its bytes do not count in
// Stats.Sent. name distinguishes rounds in signatures.
func (c *Caller) Round(label string, sig Signature, name string, vector device.Ptr, round Round) (device.Kernel, error) {
	sig.Round = name
	err := CheckBuffer(vector, sig.DType)
	if err == nil && len(round) != c.Ranks {
		err = fmt.Errorf("a round of %d ranks, want %d", len(round), c.Ranks)
	}
	return c.bind(label, err, Call{Sig: sig, Out: vector, Round: round})
}

// Barrier binds a barrier over all ranks.
func (c *Caller) Barrier(label string) (device.Kernel, error) {
	return c.bind(label, nil, Call{Sig: Signature{Op: Barrier}})
}

// Share returns the range of elements that rank i of w adds in an all-reduce of n
// elements. Ranges are of equal length and start at multiples of 16 elements, a cache line of
// f32, so that no two ranks write to the same line.
func Share(n, i, w int64) (from, to int64) {
	const line = 16
	at := func(i int64) int64 {
		if i == w {
			return n
		}
		return n * i / w / line * line
	}
	return at(i), at(i + 1)
}
