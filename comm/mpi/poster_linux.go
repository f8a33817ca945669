package mpi

import (
	"math"
	"unsafe"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/internal/dl"
)

// block describes an MPI data type of the given number of bytes, whose consecutive elements begin
// stride bytes apart. MPI's counts have 32 bits, so larger transfers count blocks instead of bytes.
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
		return p.check("MPI_Iallgatherv", dl.Call(p.fn.iallgatherv, p.inPlace, 0, p.byteType,
			address(buf), numbers(parts.n), numbers(parts.at), p.byteType, group, request))
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
