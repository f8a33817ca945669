package mpi

import (
	"math"
	"unsafe"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/internal/dl"
)

// The collectives of a group whose ranks have a process each: MPI's own non-blocking
// all-gather and all-to-all (with counts) on the group's communicator. They carry bytes;
// addends are received into scratch memory, and Spillway adds them.

// block describes an MPI data type of so many bytes, whose consecutive elements begin stride
// bytes apart. MPI's counts have 32 bits, so larger transfers count blocks instead of bytes.
type block struct{ bytes, stride int64 }

// maxCount is the largest count or displacement of a call. Tests reduce it.
var maxCount int64 = math.MaxInt32

// poster starts the MPI calls of an exchange.
type poster struct {
	*lib
	types []uintptr // MPI types created for the exchange, freed when it is complete
}

// of returns count and type of one block.
func (p *poster) of(b block) (count, kind uintptr, err error) {
	if b.bytes == b.stride && b.bytes <= maxCount { // consecutive bytes need no type
		return uintptr(b.bytes), p.byteType, nil
	}
	kind, err = p.newType(b)
	return 1, kind, err
}

// newType creates the MPI type of a block of at most maxCount bytes.
func (p *poster) newType(b block) (uintptr, error) {
	var plain, kind uint64 // a handle of 32 bits fills the lower half
	// The pointer conversion must be in the call's argument list, which moves the variable to
	// the heap: see dl.Call.
	err := p.check("MPI_Type_contiguous", dl.Call(p.fn.typeContiguous, uintptr(b.bytes), p.byteType, uintptr(unsafe.Pointer(&plain))))
	if err == nil {
		err = p.check("MPI_Type_create_resized", dl.Call(p.fn.typeResized, uintptr(plain), 0, uintptr(b.stride), uintptr(unsafe.Pointer(&kind))))
		_ = p.check("MPI_Type_free", dl.Call(p.fn.typeFree, uintptr(unsafe.Pointer(&plain))))
	}
	if err == nil {
		err = p.check("MPI_Type_commit", dl.Call(p.fn.typeCommit, uintptr(unsafe.Pointer(&kind))))
		p.types = append(p.types, uintptr(kind))
	}
	return uintptr(kind), err
}

// free frees the MPI types created for the exchange.
func (p *poster) free() error {
	for _, t := range p.types {
		h := uint64(t)
		if err := p.check("MPI_Type_free", dl.Call(p.fn.typeFree, uintptr(unsafe.Pointer(&h)))); err != nil {
			return err
		}
	}
	p.types = nil
	return nil
}

// post starts one MPI call, which writes its request handle to address request.
type post func(p *poster, request uintptr) error

// even is an all-gather or an all-to-all of one block from and to each rank. If send is nil
// in an all-gather, the rank's own block already lies in recv.
func even(op comm.Op, group uintptr, send, recv []byte, from, to block) post {
	return func(p *poster, request uintptr) error {
		name, fn := "MPI_Iallgather", p.fn.iallgather
		if op == comm.AllToAll {
			name, fn = "MPI_Ialltoall", p.fn.ialltoall
		}
		count, kind, err := p.of(to)
		if err != nil {
			return err
		}
		sent, as, source := count, kind, p.inPlace
		if send != nil {
			source = address(send)
			if sent, as, err = p.of(from); err != nil {
				return err
			}
		}
		return p.check(name, dl.Call(fn, source, sent, as, address(recv), count, kind, group, request))
	}
}

// counts holds, by rank index, the number of bytes sent to or received from each rank and
// their offset in the buffer.
type counts struct{ n, at []int32 }

func newCounts(w int) counts { return counts{make([]int32, w), make([]int32, w)} }

// gatherParts is an all-gather of parts of buf, in which the rank's own part is already in
// place.
func gatherParts(group uintptr, buf []byte, parts counts) post {
	return func(p *poster, request uintptr) error {
		return p.check("MPI_Iallgatherv", dl.Call(p.fn.iallgatherv, p.inPlace, 0, p.byteType, address(buf), numbers(parts.n), numbers(parts.at), p.byteType, group, request))
	}
}

// uneven is an all-to-all with counts. Counts are in bytes, but those of send are in units
// of block if one is given.
func uneven(group uintptr, send []byte, sends counts, of block, recv []byte, recvs counts) post {
	return func(p *poster, request uintptr) error {
		kind := p.byteType
		if of != (block{}) {
			var err error
			if kind, err = p.newType(of); err != nil {
				return err
			}
		}
		return p.check("MPI_Ialltoallv", dl.Call(p.fn.ialltoallv, address(send), numbers(sends.n), numbers(sends.at), kind,
			address(recv), numbers(recvs.n), numbers(recvs.at), p.byteType, group, request))
	}
}

// numbers returns the address of a list. MPI reads the list until the call is complete, so
// the exchange keeps a reference to it.
func numbers(list []int32) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(list))) }

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
