package onegpu

import (
	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// gather copies every rank's shard to this rank's full buffer. In place, it reads of
// a peer's full buffer only the peer's own part, and writes only the others' in its
// own.
func gather(k *kernel, api driver.API, s driver.Stream) (read, written int64, err error) {
	self, w := k.m.Rank(), k.m.Size()
	for j := range w {
		i := (self + j) % w // ranks start at different peers
		if i == self && k.InPlace || k.bytes == 0 {
			continue
		}
		if err := api.CopyOnDevice(k.out+driver.Address(int64(i)*k.bytes), k.met(i).in, k.bytes, s); err != nil {
			return 0, 0, err
		}
		read, written = read+k.bytes, written+k.bytes
	}
	return read, written, nil
}

// spread copies the root's buffer to this rank's.
func spread(k *kernel, api driver.API, s driver.Stream) (read, written int64, err error) {
	if k.m.Rank() == k.Sig.Root || k.bytes == 0 {
		return 0, 0, nil
	}
	return k.bytes, k.bytes, api.CopyOnDevice(k.out, k.met(k.Sig.Root).out, k.bytes, s)
}

// exchange copies this rank's part of every rank's send buffer.
func exchange(k *kernel, api driver.API, s driver.Stream) (read, written int64, err error) {
	self, w := k.m.Rank(), k.m.Size()
	for j := range w {
		i := (self + j) % w
		if k.bytes == 0 {
			continue
		}
		if err := api.CopyOnDevice(k.out+driver.Address(int64(i)*k.bytes), k.met(i).in+driver.Address(int64(self)*k.bytes), k.bytes, s); err != nil {
			return 0, 0, err
		}
		read, written = read+k.bytes, written+k.bytes
	}
	return read, written, nil
}

// add gives a reduction its sum and scratch.
func (k *kernel) add() (err error) {
	if err := comm.CheckSum(k.Sig.DType); err != nil {
		return err
	}
	if k.sum, err = k.m.newSum(k.Sig.DType, k.Sig.Order); err != nil {
		return err
	}
	n := k.m.Size()
	k.srcs, k.dsts = make([]driver.Address, n), make([]driver.Address, n)
	k.peerReads, k.peerWrites = make([]driver.Range, n), make([]driver.Range, n)
	return nil
}

// scatter sums this rank's part over the ranks.
func scatter(k *kernel, api driver.API, s driver.Stream) (read, written int64, err error) {
	self, w := k.m.Rank(), k.m.Size()
	accumulate := k.Sig.Accumulate
	if k.bytes == 0 || w == 1 && k.InPlace {
		return 0, 0, nil
	}
	part := k.Sig.Bytes / int64(w) // not k.bytes, where the sum of 16 bits is f32
	for j := range w {
		k.srcs[j] = k.met(j).in + driver.Address(int64(self)*part)
	}
	k.dsts[0] = k.out
	k.tell(api, s, 1, part, k.bytes)
	read, written = part*int64(w), k.bytes
	if accumulate {
		read += k.bytes
	}
	return read, written, k.sum.Enqueue(api, s, k.dsts[:1], k.srcs, part/k.Sig.DType.Size(), accumulate)
}

// reduce sums this rank's share of the buffer over the ranks, and stores it into the
// buffers of all.
func reduce(k *kernel, api driver.API, s driver.Stream) (read, written int64, err error) {
	w, size := k.m.Size(), k.Sig.DType.Size()
	from, to := comm.Share(k.bytes/size, int64(k.m.Rank()), int64(w))
	if from == to || w == 1 {
		return 0, 0, nil
	}
	for j := range w {
		k.srcs[j] = k.met(j).out + driver.Address(from*size)
		k.dsts[j] = k.srcs[j]
	}
	part := (to - from) * size
	k.tell(api, s, w, part, part)
	n := int64(w)
	return part * n, part * n, k.sum.Enqueue(api, s, k.dsts, k.srcs, to-from, false)
}

// tell says to an observer what the sum reads and writes of the peers' memory, in bytes
// of each source and each destination.
func (k *kernel) tell(api driver.API, s driver.Stream, outs int, read, written int64) {
	o, ok := api.(driver.Observer)
	if !ok {
		return
	}
	for i, a := range k.srcs {
		k.peerReads[i] = driver.Range{At: a, Len: read}
	}
	for i, a := range k.dsts[:outs] {
		k.peerWrites[i] = driver.Range{At: a, Len: written}
	}
	o.Access(k.Label(), s, k.peerReads, k.peerWrites[:outs])
}
