package mpi

import (
	"hash/fnv"
	"slices"

	"github.com/spillway-ml/spillway/comm"
)

// partners lists the indices to which the rank sends or from which it receives in a round.
func partners(r comm.Round, self int) (list []int) {
	for i, moves := range r {
		for _, m := range moves {
			for _, from := range m.From {
				switch {
				case from == i:
				case i == self:
					list = append(list, from)
				case from == self:
					list = append(list, i)
				}
			}
		}
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// roundMark returns a number that distinguishes rounds in a header: 0 for a complete
// operation.
func roundMark(name string) uint32 {
	if name == "" {
		return 0
	}
	h := fnv.New32a()
	h.Write([]byte(name))
	return h.Sum32() | 1
}

// moveRound does the rank's part of a round, a limited number of bytes of each move at a
// time. Addends are received into scratch first.
func (k *kernel) moveRound() (read, written int64, err error) {
	size := k.Sig.DType.Size()
	longest, sources := int64(0), 1
	for _, moves := range k.Round {
		for _, m := range moves {
			longest, sources = max(longest, m.Len*size), max(sources, len(m.From))
		}
	}
	// Every rank uses the same piece size, so that sender and receiver split a move alike.
	room := int64(len(k.m.scratch))
	for _, moves := range k.Round {
		if n := int64(len(moves) * sources); n > 0 {
			room = min(room, int64(len(k.m.scratch))/n)
		}
	}
	if room = room / 64 * 64; sources == 1 {
		room = max(longest, 1) // no addends, so scratch is not a limit
	}
	for at := int64(0); at < longest; at += room {
		n, err := k.piece(at, room)
		read, written = read+n, written+n
		if err != nil {
			return read, written, err
		}
	}
	return read, written, nil
}

// piece moves bytes [at, at+room) of every move.
func (k *kernel) piece(at, room int64) (moved int64, err error) {
	size := k.Sig.DType.Size()
	cut := func(m comm.Move) []byte {
		n := m.Len * size
		return k.out[m.At*size:][min(n, at):min(n, at+room)]
	}
	k.list = k.list[:0]
	for i, moves := range k.Round {
		for _, m := range moves {
			if b := cut(m); i != k.at && len(b) > 0 && slices.Contains(m.From, k.at) {
				k.list = append(k.list, k.m.to(k.ranks[i], tagBytes, b))
			}
		}
	}
	free := k.m.scratch
	type sum struct {
		dst  []byte
		srcs [][]byte
	}
	var sums []sum
	for _, m := range k.Round[k.at] {
		dst := cut(m)
		if len(dst) == 0 {
			continue
		}
		moved += int64(len(dst))
		if len(m.From) == 1 {
			k.list = append(k.list, k.m.from(k.ranks[m.From[0]], tagBytes, dst))
			continue
		}
		s := sum{dst: dst}
		for _, from := range m.From {
			src := dst
			if from != k.at {
				src, free = free[:len(dst):len(dst)], free[(len(dst)+63)/64*64:]
				k.list = append(k.list, k.m.from(k.ranks[from], tagBytes, src))
			}
			s.srcs = append(s.srcs, src)
		}
		sums = append(sums, s)
	}
	if err := k.m.world.exchange(k.list); err != nil {
		return moved, err
	}
	for _, s := range sums {
		k.adder.Sum(s.dst, s.srcs, false)
	}
	return moved, nil
}
