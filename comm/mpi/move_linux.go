package mpi

import (
	"errors"
	"math"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/watch"
)

// move moves the bytes of the operation. It returns the number of bytes that the rank read from and
// wrote to its own memory.
func (k *kernel) move() (read, written int64, err error) {
	if k.Round != nil {
		return k.moveRound()
	}
	w, self := len(k.ranks), k.at
	collective := k.m.group != 0 && w > 1
	part := func(b []byte, i int) []byte { n := len(b) / w; return b[i*n : (i+1)*n] }
	switch k.Sig.Op {
	case comm.AllGather:
		switch {
		case collective && k.InPlace:
			err = k.everyPart(comm.AllGather, nil, k.out)
		case collective:
			err = k.everyPart(comm.AllGather, k.in, k.out)
		default:
			if !k.InPlace {
				copy(part(k.out, self), k.in)
			}
			err = k.all(func(i int) []byte { return part(k.out, i) }, func(int) []byte { return k.in })
		}
		return int64(len(k.in) * (w - 1)), int64(len(k.in) * (w - 1)), err
	case comm.Broadcast:
		recv, send := none, none
		if self == k.Sig.Root {
			send = func(int) []byte { return k.out }
		} else {
			recv = func(i int) []byte {
				if i != k.Sig.Root {
					return nil
				}
				return k.out
			}
		}
		return 0, int64(len(k.out)), k.all(recv, send)
	case comm.AllToAll:
		if collective {
			return int64(len(k.in)), int64(len(k.out)), k.everyPart(comm.AllToAll, k.in, k.out)
		}
		copy(part(k.out, self), part(k.in, self))
		err = k.all(func(i int) []byte { return part(k.out, i) }, func(i int) []byte { return part(k.in, i) })
		return int64(len(k.in)), int64(len(k.out)), err
	case comm.ReduceScatter:
		if w == 1 && k.InPlace {
			return 0, 0, nil
		}
		own := part(k.in, self)
		n := int64(len(own))
		move := k.chunkMessages(own, func(i int) []byte { return part(k.in, i) })
		if collective && w <= maxLandings {
			move = func(c int64) *exchange {
				send, sends, of := k.scatterSends(k.in, n, c)
				return k.scatterChunk(send, sends, of, k.landing(0, c), int64(len(chunk(own, c))))
			}
		}
		err = k.sum(k.out, own, k.Sig.Accumulate, n, move)
		return int64(len(k.in)), int64(len(k.out)), err
	case comm.AllReduce:
		return k.allReduce()
	case comm.SendRecv:
		t := k.m.from(k.ranks[0], tagPairBytes, k.out)
		if k.Sends() {
			t = k.m.to(k.ranks[0], tagPairBytes, k.in)
			t.sync = true
		}
		k.list = append(k.list[:0], t)
		return int64(len(k.in)), int64(len(k.out)), k.m.world.exchange(k.list)
	}
	return 0, 0, nil // a barrier
}

// shortBytes is the longest message that travels with the headers. A rank sends at most
// twice that in total with the headers of one operation. MPI libraries buffer messages of this
// size for receivers that have not arrived yet. Tests reduce it.
var shortBytes = 64 << 10

// isShort tells whether every message of the operation is short. It depends only on the
// signature, so that ranks with equal signatures decide alike.
func (k *kernel) isShort() bool {
	w, n := len(k.ranks), 0
	switch k.Sig.Op {
	case comm.AllGather:
		n = len(k.in)
	case comm.AllToAll, comm.ReduceScatter:
		n = len(k.in) / w
	case comm.AllReduce:
		n = len(k.out)
	}
	return k.Round == nil && n > 0 && w > 1 && n <= shortBytes && n*(w-1) <= 2*shortBytes
}

// moveShort runs a short operation as one exchange, together with its headers. Addends go
// directly to every rank that adds them. All messages use scratch memory instead of the rank's
// arena: they are posted before the ranks have agreed, and if the job ends meanwhile, the arena
// may be freed while MPI still accesses pending messages.
func (k *kernel) moveShort() (read, written int64, err error) {
	w, self := len(k.ranks), k.at
	part := func(b []byte, i int) []byte { n := len(b) / w; return b[i*n : (i+1)*n] }
	from := k.in // the source of the message to index i
	give := func(i int) []byte { return part(k.in, i) }
	read, written = int64(len(k.in)), int64(len(k.out))
	switch k.Sig.Op {
	case comm.AllGather:
		give = func(int) []byte { return from }
		read *= int64(w - 1)
		written = read
	case comm.AllReduce:
		from = k.out
		give = func(int) []byte { return from }
		read = written
	}
	recv := func(i int) []byte { return k.landing(i, 0)[:len(give(i))] }
	send := func(i int) []byte { return k.landing(i, 1)[:len(give(i))] }
	for i := range w {
		copy(send(i), give(i))
	}
	first := len(k.list)
	k.addAll(recv, send)
	err = k.m.world.run(&exchange{list: k.list, first: first, check: func() bool {
		k.m.world.show(k, watch.Moving)
		return k.differs() < 0
	}})
	switch {
	case errors.Is(err, errRefused):
		return 0, 0, k.mismatch(k.differs())
	case err != nil:
		return 0, 0, k.m.world.failed(k, err)
	}
	for i := range w {
		k.srcs[i] = recv(i)
	}
	k.srcs[self] = give(self)
	if k.adder != nil {
		k.adder.Sum(k.out, comm.Addends(&k.Call, k.srcs), k.Sig.Accumulate)
		return read, written, nil
	}
	for i, b := range k.srcs {
		if i != self || k.Sig.Op == comm.AllToAll || !k.InPlace {
			copy(part(k.out, i), b)
		}
	}
	return read, written, nil
}

// smallBytes is the largest buffer for which an all-reduce sends every buffer to all ranks.
// Each rank then adds them all in the same order: one exchange instead of two.
const smallBytes = 8 << 10

// allReduce sums the rank's share of the buffer over the ranks and sends the sum to all
// ranks.
func (k *kernel) allReduce() (read, written int64, err error) {
	w, n := len(k.ranks), int64(len(k.out))
	collective := k.m.group != 0 && w <= maxLandings
	switch {
	case w == 1:
		return 0, 0, nil
	case n <= smallBytes:
		return n, n, k.smallReduce(collective)
	case !collective:
		return n, n, k.reduceShares(k.out, false)
	}
	segment := maxCount / 64 * 64 // limit of counts and displacements
	for at := int64(0); at < n; at += segment {
		if err := k.reduceShares(k.out[at:min(n, at+segment)], true); err != nil {
			return 0, 0, err
		}
	}
	return n, n, nil
}

// smallReduce is an all-reduce in which every rank receives all buffers and adds them.
func (k *kernel) smallReduce(collective bool) error {
	var err error
	if collective {
		err = k.gatherAll(k.out)
	} else {
		for i := range k.srcs {
			k.srcs[i] = k.m.scratch[i*chunkBytes:][:len(k.out)]
		}
		copy(k.srcs[k.at], k.out)
		err = k.all(func(i int) []byte { return k.srcs[i] }, func(int) []byte { return k.out })
	}
	if err == nil {
		k.adder.Sum(k.out, k.srcs, false)
	}
	return err
}

// reduceShares sums the rank's share of a buffer over the ranks and sends it to all ranks.
func (k *kernel) reduceShares(buf []byte, collective bool) error {
	w, n, size := len(k.ranks), int64(len(buf)), k.Sig.DType.Size()
	share := func(i int) []byte {
		from, to := comm.Share(n/size, int64(i), int64(w))
		return buf[from*size : to*size]
	}
	longest := int64(0)
	for i := range w {
		longest = max(longest, int64(len(share(i))))
	}
	own := share(k.at)
	move := k.chunkMessages(own, share)
	if collective {
		move = func(c int64) *exchange {
			return k.scatterChunk(buf, k.shareSends(n, size, c), block{}, k.landing(0, c), int64(len(chunk(own, c))))
		}
	}
	if err := k.sum(own, own, false, longest, move); err != nil {
		return err
	}
	if !collective {
		return k.all(share, func(int) []byte { return own })
	}
	parts := newCounts(w)
	for i := range w {
		from, _ := comm.Share(n/size, int64(i), int64(w))
		parts.n[i], parts.at[i] = int32(len(share(i))), int32(from*size)
	}
	return k.collect(n, gatherParts(k.m.group, buf, parts))
}

// maxLandings is the largest number of ranks whose chunks MPI's 32-bit displacements can
// address.
const maxLandings = math.MaxInt32/chunkBytes + 1

// chunkMessages returns a function that makes the messages of chunk c of a sum. part(i) is
// this rank's addend for the part of index i. own is this rank's own part; every other rank
// sends an addend of the same length for it.
func (k *kernel) chunkMessages(own []byte, part func(i int) []byte) func(c int64) *exchange {
	m := k.m
	return func(c int64) *exchange {
		list := make([]transfer, 0, 2*len(k.ranks))
		for j := 1; j < len(k.ranks); j++ {
			i := (k.at + j) % len(k.ranks)
			if n := len(chunk(own, c)); n > 0 {
				list = append(list, m.from(k.ranks[i], tagBytes, k.landing(i, c)[:n]))
			}
			if b := chunk(part(i), c); len(b) > 0 {
				list = append(list, m.to(k.ranks[i], tagBytes, b))
			}
		}
		return &exchange{list: list, met: true}
	}
}

// sum adds the ranks' addends for this rank's part into dst, which is own or does not overlap
// it. own is this rank's addend, longest the length of the longest part of any rank, and move
// makes the exchange of a chunk. While one chunk is added the next one is in transit. dst has
// as many elements as own; in a sequential sum they are f32.
func (k *kernel) sum(dst, own []byte, accumulate bool, longest int64, move func(c int64) *exchange) error {
	w := k.m.world
	chunks := (longest + chunkBytes - 1) / chunkBytes
	if chunks == 0 {
		return nil
	}
	wait := func() error { return w.run(move(0)) } // the first chunk: nothing to add meanwhile
	for c := range chunks {
		if err := wait(); err != nil {
			return err
		}
		if c+1 < chunks {
			next := w.engine.start(move(c + 1))
			wait = func() error { return w.wait(next) }
		}
		k.srcs[k.at] = chunk(own, c)
		n := len(k.srcs[k.at])
		for i := range k.srcs {
			if i != k.at {
				k.srcs[i] = k.landing(i, c)[:n]
			}
		}
		if n > 0 {
			wide := len(dst) / len(own) // 2 where 16 bits are added in f32
			at := int(c) * chunkBytes * wide
			k.adder.At(int(c)*chunkBytes/int(k.Sig.DType.Size()), dst[at:at+n*wide], comm.Addends(&k.Call, k.srcs), accumulate)
		}
	}
	return nil
}
