package onegpu

import (
	"errors"
	"fmt"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

// AllGather copies every rank's shard to this rank's full buffer.
func (m *member) AllGather(label string, shard, full device.Ptr, dtype graph.DType) (device.Kernel, error) {
	if err := comm.CheckShards(full, shard, dtype, m.index, m.Size(), false); err != nil {
		return nil, m.refuse(comm.AllGather, label, err)
	}
	k, err := m.bind(label, comm.Signature{Op: comm.AllGather, Bytes: full.Len, DType: dtype}, shard, full)
	if err != nil {
		return nil, err
	}
	k.inPlace, k.bytes, k.move = shard.Overlaps(full), shard.Len, gather
	if k.inPlace {
		k.writes = []device.Ptr{{Arena: full.Arena, Off: full.Off, Len: shard.Off - full.Off},
			{Arena: full.Arena, Off: shard.Off + shard.Len, Len: full.Off + full.Len - shard.Off - shard.Len}}
	}
	return k, nil
}

// gather, in place, reads of a peer's full buffer only the peer's own part, and
// writes only the others' in its own.
func gather(k *kernel, api driver.API, s driver.Stream) (read, written int64, err error) {
	posted := k.m.group.posted
	for j := range posted {
		i := (k.m.index + j) % len(posted) // ranks start at different peers
		if i == k.m.index && k.inPlace || k.bytes == 0 {
			continue
		}
		if err := api.CopyOnDevice(k.out+driver.Address(int64(i)*k.bytes), posted[i].in, k.bytes, s); err != nil {
			return 0, 0, err
		}
		read, written = read+k.bytes, written+k.bytes
	}
	return read, written, nil
}

// Broadcast copies the root's buffer to every rank's.
func (m *member) Broadcast(label string, buf device.Ptr, dtype graph.DType, root int) (device.Kernel, error) {
	if err := comm.CheckBuffer(buf, dtype); err != nil {
		return nil, m.refuse(comm.Broadcast, label, err)
	}
	if root < 0 || root >= m.Size() {
		return nil, m.refuse(comm.Broadcast, label, fmt.Errorf("root %d of %d ranks", root, m.Size()))
	}
	k, err := m.bind(label, comm.Signature{Op: comm.Broadcast, Bytes: buf.Len, DType: dtype, Root: root}, device.Ptr{}, buf)
	if err != nil {
		return nil, err
	}
	if m.index == root {
		k.reads, k.writes = k.writes, nil
	}
	k.bytes, k.move = buf.Len, spread
	return k, nil
}

func spread(k *kernel, api driver.API, s driver.Stream) (read, written int64, err error) {
	if k.m.index == k.sig.Root || k.bytes == 0 {
		return 0, 0, nil
	}
	return k.bytes, k.bytes, api.CopyOnDevice(k.out, k.m.group.posted[k.sig.Root].out, k.bytes, s)
}

// AllToAll copies this rank's part of every rank's send buffer.
func (m *member) AllToAll(label string, send, recv device.Ptr, dtype graph.DType) (device.Kernel, error) {
	part := device.Ptr{Arena: recv.Arena, Off: recv.Off, Len: recv.Len / int64(m.Size())}
	if err := comm.CheckShards(send, part, dtype, m.index, m.Size(), true); err != nil {
		return nil, m.refuse(comm.AllToAll, label, err)
	}
	if recv.Len != send.Len || recv.Overlaps(send) {
		return nil, m.refuse(comm.AllToAll, label, errors.New("want buffers of one length that lie apart"))
	}
	k, err := m.bind(label, comm.Signature{Op: comm.AllToAll, Bytes: send.Len, DType: dtype}, send, recv)
	if err != nil {
		return nil, err
	}
	k.bytes, k.move = part.Len, exchange
	return k, nil
}

func exchange(k *kernel, api driver.API, s driver.Stream) (read, written int64, err error) {
	posted := k.m.group.posted
	for j := range posted {
		i := (k.m.index + j) % len(posted)
		if k.bytes == 0 {
			continue
		}
		if err := api.CopyOnDevice(k.out+driver.Address(int64(i)*k.bytes), posted[i].in+driver.Address(int64(k.m.index)*k.bytes), k.bytes, s); err != nil {
			return 0, 0, err
		}
		read, written = read+k.bytes, written+k.bytes
	}
	return read, written, nil
}

// Send gives buf to a peer's Recv.
func (m *member) Send(label string, buf device.Ptr, dtype graph.DType, to int) (device.Kernel, error) {
	return m.pointKernel(label, buf, device.Ptr{}, dtype, to)
}

// Recv copies the buffer of a peer's Send.
func (m *member) Recv(label string, buf device.Ptr, dtype graph.DType, from int) (device.Kernel, error) {
	return m.pointKernel(label, device.Ptr{}, buf, dtype, from)
}

// pointKernel binds a Send of in or a Recv of out.
func (m *member) pointKernel(label string, in, out device.Ptr, dtype graph.DType, peer int) (device.Kernel, error) {
	buf := in
	if buf.Arena == nil {
		buf = out
	}
	if err := comm.CheckBuffer(buf, dtype); err != nil {
		return nil, m.refuse(comm.SendRecv, label, err)
	}
	if peer < 0 || peer >= m.Size() || peer == m.index {
		return nil, m.refuse(comm.SendRecv, label, fmt.Errorf("the peer of rank %d is %d, want another of %d ranks", m.index, peer, m.Size()))
	}
	k, err := m.bind(label, comm.Signature{Op: comm.SendRecv, Bytes: buf.Len, DType: dtype}, in, out)
	if err != nil {
		return nil, err
	}
	k.peer, k.bytes = peer, buf.Len
	if in.Arena != nil {
		k.sent = buf.Len
	}
	return k, nil
}

// Barrier makes the rank's stream wait for the peers'.
func (m *member) Barrier(label string) (device.Kernel, error) {
	k, err := m.bind(label, comm.Signature{Op: comm.Barrier}, device.Ptr{}, device.Ptr{})
	if err != nil {
		return nil, err
	}
	k.move = func(*kernel, driver.API, driver.Stream) (read, written int64, err error) { return 0, 0, nil }
	return k, nil
}

// ReduceScatter sums this rank's part over the ranks.
func (m *member) ReduceScatter(label string, full, shard device.Ptr, dtype graph.DType, accumulate bool) (device.Kernel, error) {
	if err := comm.CheckShards(full, shard, dtype, m.index, m.Size(), accumulate); err != nil {
		return nil, m.refuse(comm.ReduceScatter, label, err)
	}
	k, err := m.bind(label, comm.Signature{Op: comm.ReduceScatter, Bytes: full.Len, DType: dtype, Accumulate: accumulate}, full, shard)
	if err != nil {
		return nil, err
	}
	k.inPlace, k.bytes, k.move = shard.Overlaps(full), shard.Len, scatter
	if k.inPlace { // peers read the other parts
		k.reads = nil
	}
	return k, k.add(dtype, comm.ReduceScatter)
}

// AllReduce sums this rank's share of the buffer over the ranks, and stores it
// into the buffers of all.
func (m *member) AllReduce(label string, buf device.Ptr, dtype graph.DType) (device.Kernel, error) {
	if err := comm.CheckBuffer(buf, dtype); err != nil {
		return nil, m.refuse(comm.AllReduce, label, err)
	}
	k, err := m.bind(label, comm.Signature{Op: comm.AllReduce, Bytes: buf.Len, DType: dtype}, device.Ptr{}, buf)
	if err != nil {
		return nil, err
	}
	k.bytes, k.move = buf.Len, reduce
	return k, k.add(dtype, comm.AllReduce)
}

// add gives a reduction its sum and scratch.
func (k *kernel) add(dtype graph.DType, op comm.Op) (err error) {
	if !comm.CanSum(dtype) {
		return k.m.refuse(op, k.label, fmt.Errorf("no sum of %s, want f32, f64 or i64", dtype))
	}
	if k.sum, err = k.m.group.world.opts.Sum(dtype); err != nil {
		return k.m.refuse(op, k.label, err)
	}
	n := k.m.Size()
	k.srcs, k.dsts = make([]driver.Address, n), make([]driver.Address, n)
	k.peerReads, k.peerWrites = make([]driver.Range, n), make([]driver.Range, n)
	return nil
}

func scatter(k *kernel, api driver.API, s driver.Stream) (read, written int64, err error) {
	posted := k.m.group.posted
	accumulate := k.sig.Accumulate
	if k.bytes == 0 || len(posted) == 1 && k.inPlace {
		return 0, 0, nil
	}
	for j, p := range posted {
		k.srcs[j] = p.in + driver.Address(int64(k.m.index)*k.bytes)
	}
	k.dsts[0] = k.out
	k.tell(api, s, 1, k.bytes)
	read, written = k.bytes*int64(len(posted)), k.bytes
	if accumulate {
		read += k.bytes
	}
	return read, written, k.sum.Enqueue(api, s, k.dsts[:1], k.srcs, k.bytes/k.sig.DType.Size(), accumulate)
}

func reduce(k *kernel, api driver.API, s driver.Stream) (read, written int64, err error) {
	posted, size := k.m.group.posted, k.sig.DType.Size()
	from, to := share(k.bytes/size, int64(k.m.index), int64(len(posted)))
	if from == to || len(posted) == 1 {
		return 0, 0, nil
	}
	for j, p := range posted {
		k.srcs[j] = p.out + driver.Address(from*size)
		k.dsts[j] = k.srcs[j]
	}
	part := (to - from) * size
	k.tell(api, s, len(posted), part)
	n := int64(len(posted))
	return part * n, part * n, k.sum.Enqueue(api, s, k.dsts, k.srcs, to-from, false)
}

// tell says to an observer what the sum reads and writes of the peers' memory.
func (k *kernel) tell(api driver.API, s driver.Stream, outs int, bytes int64) {
	o, ok := api.(driver.Observer)
	if !ok {
		return
	}
	for i, a := range k.srcs {
		k.peerReads[i] = driver.Range{At: a, Len: bytes}
	}
	for i, a := range k.dsts[:outs] {
		k.peerWrites[i] = driver.Range{At: a, Len: bytes}
	}
	o.Access(k.label, s, k.peerReads, k.peerWrites[:outs])
}

// share returns the elements that rank i of w adds in an all-reduce of n: equal
// parts that start at multiples of 16 elements.
func share(n, i, w int64) (from, to int64) {
	const line = 16
	at := func(i int64) int64 {
		if i == w {
			return n
		}
		return n * i / w / line * line
	}
	return at(i), at(i + 1)
}
