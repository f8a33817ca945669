package gemm

import "unsafe"

// tile is what a micro-kernel computes: n slivers of mr rows of A times one
// sliver of B. Distances are in bytes. The assembly knows the offsets.
type tile struct {
	a, b, c, bias unsafe.Pointer // bias of C's first column, or nil
	k             int            // depth in units (tile registers: in blocks of 16), at least 1
	n             int            // slivers of A, at least 1
	ldb, ldc      int            // between rows of B's sliver, of C
	step          int            // between slivers of A
	mask          int            // valid columns of C, a bit each, from bit 0
	add           int            // 0 stores, 1 adds to C
	next          uintptr        // what is read next; only brought nearer, never read here

	// Of tile registers.
	row    int // between rows of A
	block  int // between blocks of 16 units of A
	times  int // blocks of K, k deep each; a, b, next and add move on with them
	config [64]byte

	// Of a row of tiles (rowTiles).
	out                  unsafe.Pointer // first 16-bit element of C; nil: the sums stay at c
	ldo                  int            // between its rows
	_                    uintptr        // the kernel's own
	stepB, stepC         int            // between slivers of B, tiles of sums
	rowScales, colScales unsafe.Pointer // of int8

	// Of AVX-512's micro-kernels: from next on, a line every 2 units of K, so many
	// bytes apart; where the one that packs B writes it.
	ahead int
	to    unsafe.Pointer
}

// configure sets the shapes of the tile registers: C in 0 … 3, row by row, A in
// 4 and 5, B in 6 and 7 (Intel SDM volume 1, 18.3).
func (t *tile) configure(rows, cols int) {
	t.config = [64]byte{0: 1} // palette 1
	set := func(tile, rows, cols int) {
		if rows > 0 && cols > 0 {
			t.config[16+2*tile] = byte(4 * cols)
			t.config[48+tile] = byte(rows)
		}
	}
	r, c := [2]int{min(rows, 16), max(rows-16, 0)}, [2]int{min(cols, 16), max(cols-16, 0)}
	for i := range 2 {
		for j := range 2 {
			set(2*i+j, r[i], c[j])
		}
		set(4+i, r[i], 16)
		set(6+i, 16, c[i])
	}
}
