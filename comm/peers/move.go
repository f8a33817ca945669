package peers

import (
	"fmt"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// gather copies every rank's shard to this rank's full buffer. In place, it reads only a
// peer's own part of the peer's full buffer, and writes only the parts of other ranks in its
// own full buffer.
func gather(k *kernel, api driver.API, s driver.Stream) (read, written int64, err error) {
	self, w := k.m.Rank(), k.m.Size()
	for j := range w {
		i := (self + j) % w // each rank starts at a different peer, to spread the load
		if i == self && k.InPlace || k.bytes == 0 {
			continue
		}
		if err := k.m.fetch(api, s, k.out+driver.Address(int64(i)*k.bytes), i, k.met(i).in, k.bytes); err != nil {
			return 0, 0, err
		}
		read, written = read+k.bytes, written+k.bytes
	}
	return read, written, nil
}

// spread copies the root's buffer into this rank's buffer (broadcast).
func spread(k *kernel, api driver.API, s driver.Stream) (read, written int64, err error) {
	if k.m.Rank() == k.Sig.Root || k.bytes == 0 {
		return 0, 0, nil
	}
	return k.bytes, k.bytes, k.m.fetch(api, s, k.out, k.Sig.Root, k.met(k.Sig.Root).out, k.bytes)
}

// exchange copies this rank's part of every rank's send buffer.
func exchange(k *kernel, api driver.API, s driver.Stream) (read, written int64, err error) {
	self, w := k.m.Rank(), k.m.Size()
	for j := range w {
		i := (self + j) % w
		if k.bytes == 0 {
			continue
		}
		if err := k.m.fetch(api, s, k.out+driver.Address(int64(i)*k.bytes), i, k.met(i).in+driver.Address(int64(self)*k.bytes), k.bytes); err != nil {
			return 0, 0, err
		}
		read, written = read+k.bytes, written+k.bytes
	}
	return read, written, nil
}

// add sets a reduction's GPU sum and allocates its address lists.
func (k *kernel) add() (err error) {
	if err := comm.CheckSum(k.Sig.DType); err != nil {
		return err
	}
	if k.sum, err = k.m.world.o.Sum(k.m.GlobalRank(), k.Sig.DType, k.Sig.Order); err != nil {
		return err
	}
	n := k.m.Size()
	if k.m.beyond > 0 && k.m.port.each(k.m.beyond, k.Sig.DType.Size()) == 0 {
		return fmt.Errorf("%d bytes of scratch hold nothing of %d ranks on other GPUs", k.m.world.o.Scratch, k.m.beyond)
	}
	k.srcs, k.dsts = make([]driver.Address, n), make([]driver.Address, n)
	k.pieceSrcs, k.pieceDsts = make([]driver.Address, n), make([]driver.Address, n)
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
	part := k.Sig.Bytes / int64(w) // k.bytes is larger if 16-bit elements have an f32 sum
	for j := range w {
		k.srcs[j] = k.met(j).in + driver.Address(int64(self)*part)
	}
	k.dsts[0] = k.out
	read, written = part*int64(w), k.bytes
	if accumulate {
		read += k.bytes
	}
	return read, written, k.sumOf(api, s, k.dsts[:1], part, k.bytes, accumulate)
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
	n := int64(w)
	return part * n, part * n, k.sumOf(api, s, k.dsts, part, part, false)
}

// sumOf sums k.srcs, read bytes each, into written bytes at each of dsts. If all of them are
// on the rank's GPU, it is one launch, else see sumInPieces.
func (k *kernel) sumOf(api driver.API, s driver.Stream, dsts []driver.Address, read, written int64, accumulate bool) error {
	if k.m.beyond > 0 {
		return k.sumInPieces(api, s, dsts, read, written, accumulate)
	}
	srcs := comm.Addends(&k.Call, k.srcs)
	k.tell(api, s, dsts, srcs, read, written)
	return k.sum.Enqueue(api, s, dsts, srcs, read/k.Sig.DType.Size(), accumulate)
}

// tell reports the memory that a sum reads and writes to the driver's observer, if there is
// one. read and written are the bytes of each source and of each destination.
func (k *kernel) tell(api driver.API, s driver.Stream, dsts, srcs []driver.Address, read, written int64) {
	o, ok := api.(driver.Observer)
	if !ok {
		return
	}
	for i, a := range srcs {
		k.peerReads[i] = driver.Range{At: a, Len: read}
	}
	for i, a := range dsts {
		k.peerWrites[i] = driver.Range{At: a, Len: written}
	}
	o.Access(k.Label(), s, k.peerReads[:len(srcs)], k.peerWrites[:len(dsts)])
}
