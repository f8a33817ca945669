package memplan

// bitRows holds sets of numbers below some n, one set a row, in one slice of memory.
type bitRows struct {
	words int // a row
	bits  []uint64
}

func newBitRows(rows, n int) bitRows {
	w := (n + 63) / 64
	return bitRows{w, make([]uint64, rows*w)}
}

func (m *bitRows) row(i int32) []uint64 { return m.bits[int(i)*m.words : (int(i)+1)*m.words] }

// mirrorTile is the side of the tiles in which mirror works, in blocks of 64 × 64 bits. It is a
// cache line of words, so that each line of both sides is fetched once a tile.
const mirrorTile = 8

// mirror makes a square matrix symmetric: it puts i into row j if j is in row i.
func (m *bitRows) mirror() {
	n := m.words
	for ti := 0; ti < n; ti += mirrorTile {
		for tj := ti; tj < n; tj += mirrorTile {
			for bi := ti; bi < min(ti+mirrorTile, n); bi++ {
				for bj := max(tj, bi); bj < min(tj+mirrorTile, n); bj++ {
					m.mirrorBlock(bi, bj)
				}
			}
		}
	}
}

// mirrorBlock mirrors word bj of rows [64·bi, 64·bi+64) into word bi of rows
// [64·bj, 64·bj+64), and the reverse.
func (m *bitRows) mirrorBlock(bi, bj int) {
	rows := len(m.bits) / m.words
	var a, b [64]uint64
	var any uint64
	for k := range min(64, rows-64*bi) {
		a[k] = m.bits[(64*bi+k)*m.words+bj]
		any |= a[k]
	}
	for k := range min(64, rows-64*bj) {
		b[k] = m.bits[(64*bj+k)*m.words+bi]
		any |= b[k]
	}
	if any == 0 {
		return
	}
	at, bt := a, b
	transpose(&at)
	transpose(&bt)
	for k := range min(64, rows-64*bi) {
		m.bits[(64*bi+k)*m.words+bj] |= bt[k]
	}
	for k := range min(64, rows-64*bj) {
		m.bits[(64*bj+k)*m.words+bi] |= at[k]
	}
}

// transpose swaps bit j of word i with bit i of word j. It swaps halves, then halves of halves
// (Warren, Hacker's Delight, section 7-3).
func transpose(a *[64]uint64) {
	mask := uint64(0x00000000FFFFFFFF)
	for j := 32; j != 0; j, mask = j>>1, mask^mask<<(j>>1) {
		for k := 0; k < 64; k = (k + j + 1) &^ j {
			t := (a[k]>>j ^ a[k+j]) & mask
			a[k] ^= t << j
			a[k+j] ^= t
		}
	}
}
