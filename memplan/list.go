package memplan

import "slices"

// list holds the byte ranges of placed buffers by offset; with equal offsets the latest is first.
// at is the position of findFew. seek reads only hi and buf, and mostly buf.
type list struct {
	lo, hi []int64
	buf    []int32
	at     int
}

func (l *list) clear() { l.lo, l.hi, l.buf = l.lo[:0], l.hi[:0], l.buf[:0] }

func (l *list) insert(i int32, lo, hi int64) {
	n, _ := slices.BinarySearch(l.lo, lo)
	l.lo, l.hi, l.buf = slices.Insert(l.lo, n, lo), slices.Insert(l.hi, n, hi), slices.Insert(l.buf, n, i)
}

// seek advances to the next buffer that is in row (the set of buffers that overlap in time) and
// ends above free. Buffers that end at free or below cannot change the result.
func (l *list) seek(row []uint64, free int64) {
	k, buf := l.at, l.buf
	hi := l.hi[:len(buf)]
	for ; k < len(buf); k++ {
		if i := uint32(buf[k]); row[i>>6]>>(i&63)&1 == 1 && hi[k] > free {
			break
		}
	}
	l.at = k
}
