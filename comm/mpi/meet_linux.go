package mpi

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/world"
	"github.com/spillway-ml/spillway/graph"
)

// headerBytes is the length of a header: call, operation, dtype, bytes, root,
// flags, each of 8 bytes.
const headerBytes = 48

func (k *kernel) writeHeader(b []byte) {
	flags := uint64(0)
	if k.Sig.Accumulate {
		flags = 1
	}
	flags |= uint64(k.Sig.Order) << 1
	call := k.m.calls
	if k.Sig.Op == comm.SendRecv {
		call = 0
	}
	root := uint64(k.Sig.Root) | uint64(roundMark(k.Sig.Round))<<32
	for i, v := range []uint64{call, world.OpNumber(k.Sig.Op), uint64(k.Sig.DType), uint64(k.Sig.Bytes), root, flags} {
		binary.LittleEndian.PutUint64(b[8*i:], v)
	}
}

func readHeader(b []byte) (call uint64, s comm.Signature) {
	v := func(i int) uint64 { return binary.LittleEndian.Uint64(b[8*i:]) }
	return v(0), comm.Signature{Op: world.OpOf(v(1)), DType: graph.DType(v(2)), Bytes: int64(v(3)), Root: int(uint32(v(4))),
		Order: graph.SumOrder(v(5) >> 1), Accumulate: v(5)&1 != 0}
}

func (k *kernel) ownHeader() []byte { return k.m.headers[:headerBytes] }

func (k *kernel) header(i int) []byte { return k.m.headers[(i+1)*headerBytes : (i+2)*headerBytes] }

// addHeaders adds the headers to and from every other rank of the operation.
func (k *kernel) addHeaders() {
	kind := tagHeader
	if k.Sig.Op == comm.SendRecv {
		kind = tagPairHeader
	}
	k.writeHeader(k.ownHeader())
	for i, r := range k.ranks {
		if k.meets(i) {
			k.list = append(k.list, k.m.from(r, kind, k.header(i)), k.m.to(r, kind, k.ownHeader()))
		}
	}
}

// differs returns the index of the first rank whose header differs from this rank's; −1: none.
func (k *kernel) differs() int {
	for i := range k.ranks {
		if k.meets(i) && string(k.header(i)) != string(k.ownHeader()) {
			return i
		}
	}
	return -1
}

// mismatch fails the job with an error that names rank index i, whose header differs.
func (k *kernel) mismatch(i int) error {
	m := k.m
	call, sig := readHeader(k.header(i))
	return m.world.fail(fmt.Errorf("%w in the %s group: rank %d runs %s (%q, call %d), rank %d runs %s (call %d)", comm.ErrMismatch, m.Name,
		m.World, k.Sig, k.Name, m.calls, k.ranks[i], sig, call))
}

// meets tells whether the rank exchanges headers with the rank of index i.
func (k *kernel) meets(i int) bool {
	return i != k.at && (k.Round == nil || slices.Contains(k.with, i))
}
