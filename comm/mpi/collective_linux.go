package mpi

import "github.com/spillway-ml/spillway/comm"

// The collectives of a group whose ranks have a process each: MPI's own non-blocking
// all-gather and all-to-all (with counts) on the group's communicator. They carry bytes;
// addends are received into scratch memory, and Spillway adds them.

// collect runs collective calls on the group's communicator, which move bytes bytes in
// total.
func (k *kernel) collect(bytes int64, posts ...post) error {
	return k.m.world.run(&exchange{posts: posts, bytes: bytes, met: true})
}

// everyPart runs an all-gather (in place if in is nil) or an all-to-all. It makes one call
// for each piece of at most maxMessage bytes of a rank's part.
func (k *kernel) everyPart(op comm.Op, in, out []byte) error {
	n := int64(len(out) / len(k.ranks))
	if n == 0 {
		return nil
	}
	most := int64(maxMessage)
	var posts []post
	for at := int64(0); at < n; at += most {
		to := block{min(n-at, most), n}
		from, send := to, in
		if op == comm.AllGather {
			from.stride = from.bytes
		}
		if in != nil {
			send = in[at:]
		}
		posts = append(posts, even(op, k.m.group, send, out[at:], from, to))
	}
	return k.collect(int64(len(out)), posts...)
}

// gatherAll gathers the buffers of all ranks into k.srcs, on every rank.
func (k *kernel) gatherAll(buf []byte) error {
	n := int64(len(buf))
	for i := range k.srcs {
		k.srcs[i] = k.m.scratch[int64(i)*n:][:n]
	}
	b := block{n, n}
	return k.collect(n*int64(len(k.srcs)), even(comm.AllGather, k.m.group, buf, k.m.scratch, b, b))
}

// scatterChunk returns the exchange of one chunk of every rank's parts. sends gives the
// ranges of send for each rank; n bytes from every other rank are received at recv, one half
// of scratch, in order of index.
func (k *kernel) scatterChunk(send []byte, sends counts, of block, recv []byte, n int64) *exchange {
	recvs := newCounts(len(k.ranks))
	total := n * int64(len(k.ranks))
	for i := range recvs.n {
		recvs.at[i] = int32(i * chunkBytes)
		if i != k.at { // the rank's own chunk stays in send
			recvs.n[i] = int32(n)
		}
	}
	sends.n[k.at] = 0
	return &exchange{met: true, bytes: total, posts: []post{uneven(k.m.group, send, sends, of, recv, recvs)}}
}

// scatterSends returns what to send for chunk c of every part, for a buffer of parts of n
// bytes.
func (k *kernel) scatterSends(in []byte, n, c int64) (send []byte, sends counts, of block) {
	at := min(n, c*chunkBytes)
	size := min(n-at, chunkBytes)
	sends = newCounts(len(k.ranks))
	far := int64(len(in)) > maxCount
	if far {
		of = block{size, n}
	}
	for i := range sends.n {
		sends.n[i], sends.at[i] = int32(size), int32(int64(i)*n)
		if far {
			sends.n[i], sends.at[i] = 1, int32(i)
		}
	}
	return in[at:], sends, of
}

// shareSends returns what to send for chunk c of every share of a buffer of at most
// maxCount bytes.
func (k *kernel) shareSends(n, size, c int64) counts {
	sends := newCounts(len(k.ranks))
	for i := range sends.n {
		from, to := comm.Share(n/size, int64(i), int64(len(k.ranks)))
		from, to = from*size, to*size
		at := min(to, from+c*chunkBytes)
		sends.n[i], sends.at[i] = int32(min(to-at, chunkBytes)), int32(at)
	}
	return sends
}
