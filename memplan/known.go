package memplan

import (
	"crypto/sha256"
	"encoding/binary"
	"strconv"
	"sync"
)

// Known caches the placements of runs for later calls of Assign. ZeRO stages and candidates of a
// search often have the same buffers: their lives differ only by steps at which none starts or
// ends. The zero value is ready to use, and safe for concurrent use. A nil *Known caches nothing.
type Known struct {
	mu   sync.Mutex
	runs map[[sha256.Size]byte]*knownRun
}

// mostKnown is the largest number of cached runs; a run needs 8 bytes a buffer.
const mostKnown = 256

// knownRun is the result of a run.
type knownRun struct {
	once         sync.Once
	stopped      bool
	off          []int64
	extent, work int64
}

// run does the same as runMany, or returns the result of an earlier run of the same problem in the
// same order.
func (kn *Known) run(pl *placer, rank []int32, how fit) (off []int64, extent int64) {
	if kn == nil {
		return pl.runMany(rank, how)
	}
	key := pl.problem(rank, how)
	kn.mu.Lock()
	if kn.runs == nil || len(kn.runs) == mostKnown {
		kn.runs = map[[sha256.Size]byte]*knownRun{}
	}
	r := kn.runs[key]
	if r == nil {
		r = &knownRun{}
		kn.runs[key] = r
	}
	kn.mu.Unlock()
	before := pl.work
	r.once.Do(func() {
		r.off, r.extent = pl.runMany(rank, how)
		r.stopped, r.work = pl.stopped != nil, pl.work-before
	})
	if r.stopped && pl.stopped == nil { // another call was stopped, this one was not
		return pl.runMany(rank, how)
	}
	pl.work = before + r.work
	return r.off, r.extent
}

// problem returns a hash of everything that a run depends on.
func (pl *placer) problem(rank []int32, how fit) [sha256.Size]byte {
	if pl.digest == nil {
		pl.digest = pl.lives()
	}
	text := append(make([]byte, 0, len(pl.digest)+1+4*len(rank)), pl.digest...)
	text = append(text, byte(how))
	for _, i := range rank {
		text = binary.LittleEndian.AppendUint32(text, uint32(i))
	}
	if how == fromBothEnds {
		text = binary.LittleEndian.AppendUint64(text, uint64(pl.ceiling))
		for _, high := range pl.high {
			text = strconv.AppendBool(text, high)
		}
	}
	return sha256.Sum256(text)
}

// lives returns a hash of the buffers and their lives. Only the order of steps counts: they are
// numbered without those at which no range starts or ends.
func (pl *placer) lives() []byte {
	o := pl.tl.overlaps
	number := o.numbers()
	text := make([]byte, 0, 8*(7*len(pl.size)+2*len(o.span)))
	add := func(list ...int64) {
		for _, v := range list {
			text = binary.LittleEndian.AppendUint64(text, uint64(v))
		}
	}
	for i := range pl.size {
		own, beside := o.of(int32(i)), o.beside[i]
		add(pl.size[i], pl.align[i], int64(pl.group[i]), int64(o.in[i]), int64(o.split[i]), int64(len(own)), int64(len(beside)))
		for _, s := range own {
			add(number[s.from], number[s.to])
		}
		for _, j := range beside {
			add(int64(j))
		}
	}
	sum := sha256.Sum256(text)
	return sum[:]
}

// numbers numbers the steps at which ranges start or end.
func (o *overlaps) numbers() []int64 {
	most := int64(0)
	for _, s := range o.span {
		most = max(most, s.to)
	}
	number := make([]int64, most+1)
	for _, s := range o.span {
		number[s.from], number[s.to] = 1, 1
	}
	for k := range number[1:] {
		number[k+1] += number[k]
	}
	return number
}
