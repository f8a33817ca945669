package attn

import (
	"math"
	"unsafe"

	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// The SIMD path. A task packs its queries into rows without gaps, padded to a
// multiple of 16 channels, and each tile of keys and values once for all of
// them, so that every product is a dense one over tiles of 64 that stay in the
// first two caches. Tiles of queries and keys begin at multiples of 64
// positions; those above the diagonal are skipped, those on it are done by
// products whose rows' chains begin or end one step apart.
//
// Rows before the first and after the last query of a tile, and columns beyond
// D, are computed or not as blocks happen to cover them, and hold anything:
// nothing of them enters another row or column, and they are not copied out.
//
// What made it fast, forward+backward of 4 × 12 heads × 1024 × 64 at 2 threads
// of a Sapphire Rapids (200 GFLOP/s of FMA each), 90 ms at first:
//   - the products, 4 rows × 64 floats from the first cache, run at 95 % of the
//     FMA peak; 16 accumulators are enough, b's 4 vectors serve 4 broadcasts;
//   - scratch by goroutine rather than by task: the forward 46 → 30 ms;
//   - rows packed by tile when first needed, and the next tile prefetched by the
//     products meanwhile: forward 25 ms, backward 65 → 54 ms. Packing all of a
//     head's rows at first waited for memory a fifth of the time.
//
// Blocks of 512 queries cost the backward 3 % against whole sequences of 1024,
// and bound the workspace; 256 would cost 8 %.

const rowBytes = 4 * KeyTile // of a tile of scores

// carver allocates pieces of scratch memory at 64-byte boundaries.
type carver struct {
	next fptr
}

func newCarver(scratch []float32) carver {
	p := unsafe.SliceData(scratch)
	skip := -uintptr(unsafe.Pointer(p)) % 64 / 4
	return carver{at(p, int(skip))}
}

func (c *carver) take(elements int) fptr {
	p := c.next
	c.next = at(p, elements)
	return p
}

func simdForward[T Float](f *Forward[T], b, h, from, to int, scratch []T) bool {
	f32, ok := any(f).(*Forward[float32])
	if !ok || f.level == level.Portable {
		return false
	}
	s, _ := any(scratch).([]float32)
	forwardBlock(f32, b, h, from, to, s)
	return true
}

func simdBackward[T Float](f *Backward[T], b, h int, scratch []T) bool {
	f32, ok := any(f).(*Backward[float32])
	if !ok || f.level == level.Portable {
		return false
	}
	s, _ := any(scratch).([]float32)
	backwardHead(f32, b, h, s)
	return true
}

// packRows copies rows [from, to) of an operand to rows of width dp from out,
// and clears the channels beyond d.
func packRows(r *rows[float32], b, h, d, from, to int, out fptr, dp int) {
	if r.half != nil {
		for t := from; t < to; t++ {
			dst := unsafe.Slice(out, dp)
			vec.WidenRow(r.as, dst[:d], r.row16(b, t, h, d))
			clear(dst[d:])
			out = at(out, dp)
		}
		return
	}
	if d == dp && from < to {
		copyAVX(&copyArgs{in: unsafe.SliceData(r.row(b, from, h, d)), inRow: 4 * r.ld, out: out, outRow: 4 * dp, rows: to - from, columns: d})
		return
	}
	for t := from; t < to; t++ {
		dst := unsafe.Slice(out, dp)
		copy(dst, r.row(b, t, h, d))
		clear(dst[d:])
		out = at(out, dp)
	}
}

// packTile copies w rows from row j0, and clears the others of the tile.
func packTile(r *rows[float32], b, h, d, j0, w int, out fptr, dp int) {
	packRows(r, b, h, d, j0, j0+w, out, dp)
	clear(unsafe.Slice(at(out, w*dp), (KeyTile-w)*dp))
}

// unpackRows copies rows of width dp back to rows [from, to) of an operand.
func unpackRows(r *rows[float32], b, h, d, from, to int, in fptr, dp int) {
	if r.half != nil {
		for t := from; t < to; t++ {
			vec.NarrowRow(r.as, r.row16(b, t, h, d), unsafe.Slice(in, d))
			in = at(in, dp)
		}
		return
	}
	if d == dp && from < to {
		copyAVX(&copyArgs{in: in, inRow: 4 * dp, out: unsafe.SliceData(r.row(b, from, h, d)), outRow: 4 * r.ld, rows: to - from, columns: d})
		return
	}
	for t := from; t < to; t++ {
		copy(r.row(b, t, h, d), unsafe.Slice(in, d))
		in = at(in, dp)
	}
}

// ahead is a queue of tiles of rows that will be packed or written soon. Each
// product prefetches one while it computes: rows of a packed qkv lie pages
// apart, where no hardware prefetcher follows.
type ahead struct {
	tiles [8]struct {
		first uintptr
		row   int
	}
	head, n int
}

// add queues the tile of rows from row t, if there is such a row.
func (a *ahead) add(r *rows[float32], b, t, h, d, rows int) {
	if t >= rows || a.n == len(a.tiles) {
		return
	}
	tile := &a.tiles[(a.head+a.n)%len(a.tiles)]
	if r.half != nil {
		tile.first, tile.row = uintptr(unsafe.Pointer(unsafe.SliceData(r.row16(b, t, h, d)))), 2*r.ld
	} else {
		tile.first, tile.row = uintptr(unsafe.Pointer(unsafe.SliceData(r.row(b, t, h, d)))), 4*r.ld
	}
	a.n++
}

// next gives a product the oldest tile of the queue.
func (a *ahead) next(args *productArgs) {
	if a.n > 0 {
		args.pre, args.preRow = a.tiles[a.head].first, a.tiles[a.head].row
		a.head = (a.head + 1) % len(a.tiles)
		a.n--
	}
}

// forwardBlock computes queries [from, to) of a head.
func forwardBlock(f *Forward[float32], b, h, from, to int, scratch []float32) {
	lv, g, d, dp := f.level, h/(f.H/f.KV), f.D, roundUp(f.D, 16)
	n := f.queryBlock()
	c := newCarver(scratch)
	q, acc, l, m := c.take(n*dp), c.take(n*dp), c.take(n*16), c.take(n)
	kt, tile := c.take(KeyTile*dp), c.take(KeyTile*dp)
	once := to-from <= 4 && d == dp && f.v.half == nil // one block of queries: v is read once
	scores, alpha, sub := c.take(KeyTile*KeyTile), c.take(KeyTile), c.take(KeyTile)
	var pre ahead
	var v fptr
	var vRow int // bytes

	// Scratch row r holds position base+r; the queries are rows [lo, hi).
	base := (from + f.offset()) / KeyTile * KeyTile
	lo, hi := from+f.offset()-base, to+f.offset()-base
	clear(unsafe.Slice(l, 16*n))
	for i := range n {
		*at(m, i) = float32(math.Inf(-1))
	}

	see := viewOf(&f.Shape, f.Starts, b)
	keys := f.visible(to - 1)
	for j0 := see.begin(base); j0 < keys; j0 += KeyTile {
		w := min(KeyTile, f.Tk-j0)
		packTile(&f.k, b, g, d, j0, w, tile, dp)
		transposeAVX(&transposeArgs{in: tile, out: kt, inRow: 4 * dp, columns: dp})
		if end := f.v.at(b, j0+roundUp(w, 4)-1, g, d) + d; once && end <= len(f.v.data) { // blocks read 4 rows
			v, vRow = unsafe.SliceData(f.v.row(b, j0, g, d)), 4*f.v.ld
		} else {
			v, vRow = tile, 4*dp
			packTile(&f.v, b, g, d, j0, w, tile, dp)
		}
		pre.add(&f.k, b, j0+KeyTile, g, d, keys)
		pre.add(&f.v, b, j0+KeyTile, g, d, keys)
		for i0 := 0; i0 < hi; i0 += KeyTile {
			begin := see.begin(base + i0)
			if f.Causal && base+i0 < j0 || j0 < begin {
				continue
			}
			diagonal := f.Causal && base+i0 == j0
			last := diagonal || !f.Causal && j0+KeyTile >= keys
			r0, r1 := max(lo-i0, 0), min(hi-i0, KeyTile)
			t := from + i0 + r0 - lo // query of row r0
			if last {
				pre.add(&f.y, b, t, h, d, to)
			}
			if j0 == begin {
				packRows(&f.q, b, h, d, t, t+r1-r0, at(q, (i0+r0)*dp), dp)
				pre.add(&f.q, b, t+r1-r0, h, d, to)
			}
			tileScores(lv, at(q, i0*dp), kt, scores, r0, r1, w, d, dp, diagonal, &pre)
			scale := bound(unsafe.Slice(scores, KeyTile*KeyTile), r0, r1, w, &see, base+i0, j0, f.scale, f.Cap, nil)

			s0, s1 := r0&^15, roundUp(r1, 16)
			sm := softmaxArgs{scores: at(scores, s0*KeyTile), m: at(m, i0+s0), l: at(l, 16*(i0+s0)),
				alpha: at(alpha, s0), c: at(sub, s0), rows: s1 - s0, visible: w, scale: scale}
			if diagonal {
				sm.visible, sm.step = s0+1, 1
			}
			softmax(lv, &sm)

			p0, p1 := r0&^3, roundUp(r1, 4)
			pv := productArgs{a: at(scores, p0*KeyTile), aRow: rowBytes, aK: 4, aBlock: 4 * rowBytes,
				b: v, bK: vRow, c: at(acc, (i0+p0)*dp), cRow: 4 * dp, alpha: at(alpha, p0),
				blocks: (p1 - p0) / 4, k: w, head: 3, init: 2}
			if diagonal {
				pv.k, pv.kStep, pv.tail = p0+1, 4, 1
			}
			if j0 == begin {
				pv.init = 0
			}
			pre.next(&pv)
			product(lv, pv, dp)
			if !last {
				continue
			}
			rows := at(acc, (i0+r0)*dp)
			finishAVX(&finishArgs{acc: rows, l: at(l, (i0+r0)*16), sums: sub, rows: r1 - r0, columns: dp})
			unpackRows(&f.y, b, h, d, t, t+r1-r0, rows, dp)
			if f.Lse != nil {
				lse := f.Lse[(b*f.H+h)*f.Tq+t:]
				for r := range r1 - r0 {
					lse[r] = logSumExp(*at(m, i0+r0+r), *at(sub, r))
				}
			}
		}
	}
}

// bound applies the soft cap to rows [r0, r1) of a tile of scores and sets invisible keys to
// -Inf. The tile has w keys from j0 on, and its row 0 is at position base. bound returns the
// factor by which the scores must still be multiplied. If grad is not nil, it stores the cap's
// derivatives there.
func bound(scores []float32, r0, r1, w int, see *view[float32], base, j0 int, scale, limit float32, grad *[KeyTile * KeyTile]float32) float32 {
	if limit != 0 {
		for r := r0; r < r1; r++ {
			row := scores[r*KeyTile : r*KeyTile+w]
			for j, v := range row {
				row[j] = num.SoftCap(float32(scale*v), limit)
				if grad != nil {
					grad[r*KeyTile+j] = num.SoftCapGrad(row[j], limit)
				}
			}
		}
		scale = 1
	}
	if see.Window == 0 && len(see.starts) == 0 {
		return scale
	}
	for r := r0; r < r1; r++ {
		for j := range min(see.from(base+r)-j0, w) {
			scores[r*KeyTile+j] = float32(math.Inf(-1))
		}
	}
	return scale
}

// unbound multiplies the gradient of capped scores by the cap's derivative and by scale.
func unbound(ds []float32, r0, r1, w int, scale float32, grad *[KeyTile * KeyTile]float32) {
	for r := r0; r < r1; r++ {
		row := ds[r*KeyTile : r*KeyTile+w]
		for j, v := range row {
			row[j] = float32(float32(v*grad[r*KeyTile+j]) * scale)
		}
	}
}

// tileScores is rows [r0, r1) of a tile of a·b over d, a's rows of width dp, b
// transposed. On the diagonal, what lies above it may be left out.
func tileScores(lv level.Level, a, bt, out fptr, r0, r1, w, d, dp int, diagonal bool, pre *ahead) {
	args := productArgs{aRow: 4 * dp, aK: 4, aBlock: 16 * dp, b: bt, bK: rowBytes, cRow: rowBytes, k: d, head: 3}
	r0, r1 = r0&^3, roundUp(r1, 4)
	pre.next(&args)
	if !diagonal {
		args.a, args.c, args.blocks = at(a, r0*dp), at(out, r0*KeyTile), (r1-r0)/4
		product(lv, args, roundUp(w, 16))
		return
	}
	for r := r0; r < r1; {
		end := min((r+16)&^15, r1)
		args.a, args.c, args.blocks = at(a, r*dp), at(out, r*KeyTile), (end-r)/4
		product(lv, args, roundUp(end, 16))
		if args.pre != 0 {
			args.pre += uintptr((end - r) * args.preRow)
		}
		r = end
	}
}

// backwardHead is Backward.backwardHead with SIMD: blocks of queries, under
// them tiles of keys, under them tiles of the block's queries. So every dq meets
// its keys and every dk and dv its queries in increasing order. dk and dv rest
// in the output between two blocks, and between two heads of a group.
// Long function: three nested loops over tiles that share all of their scratch.
func backwardHead(f *Backward[float32], b, h int, scratch []float32) {
	group := f.H / f.KV
	lv, g, d, dp := f.level, h/group, f.D, roundUp(f.D, 16)
	n := f.queryBlock()
	c := newCarver(scratch)
	q, dy, dq, delta := c.take(n*dp), c.take(n*dp), c.take(n*dp), c.take(n)
	kt, vt, k, dk, dv := c.take(KeyTile*dp), c.take(KeyTile*dp), c.take(KeyTile*dp), c.take(KeyTile*dp), c.take(KeyTile*dp)
	p, ds := c.take(KeyTile*KeyTile), c.take(KeyTile*KeyTile)
	lse := f.Lse[(b*f.H+h)*f.Tq:][:f.Tq]
	see := viewOf(&f.Shape, f.Starts, b)
	var pre ahead

	// 16-bit dk and dv are written once where one block of one head is all.
	dkSum, dvSum := &f.dk, &f.dv
	if f.As != vec.NoHalf && (group > 1 || f.Tq > n-f.lead() || f.Tq == 0) {
		x, y := f.sums(scratch)
		dkSum, dvSum = &x, &y
	}
	if f.Tq == 0 {
		for j := range f.Tk {
			clear(dkSum.row(b, j, g, d))
			clear(dvSum.row(b, j, g, d))
		}
	}
	for from := 0; from < f.Tq; {
		// Scratch row r holds position base+r; the queries are rows [lo, hi).
		base := (from + f.offset()) / KeyTile * KeyTile
		lo := from + f.offset() - base
		to := min(from+n-lo, f.Tq)
		hi := lo + to - from
		keys := f.visible(to - 1)
		for j0 := 0; j0 < keys; j0 += KeyTile {
			w := min(KeyTile, f.Tk-j0)
			// Whether no query before saw the keys of a tile.
			fresh := func(j int) bool { return h%group == 0 && (from == 0 || f.Causal && base <= j) }
			if j0 < see.begin(base) && !fresh(j0) {
				continue
			}
			packTile(&f.v, b, g, d, j0, w, k, dp)
			transposeAVX(&transposeArgs{in: k, out: vt, inRow: 4 * dp, columns: dp})
			packTile(&f.k, b, g, d, j0, w, k, dp)
			transposeAVX(&transposeArgs{in: k, out: kt, inRow: 4 * dp, columns: dp})
			first, init := 0, 1
			if f.Causal {
				first = max(j0-base, 0)
			}
			if fresh(j0) {
				init = 0
			} else {
				packRows(dkSum, b, g, d, j0, j0+w, dk, dp)
				packRows(dvSum, b, g, d, j0, j0+w, dv, dp)
			}
			for i0 := first; i0 < hi; i0 += KeyTile {
				begin := see.begin(base + i0)
				if j0 < begin {
					continue
				}
				diagonal := f.Causal && base+i0 == j0
				last := diagonal || !f.Causal && j0+KeyTile >= keys
				r0, r1 := max(lo-i0, 0), min(hi-i0, KeyTile)
				t := from + i0 + r0 - lo // query of row r0
				if last {
					pre.add(&f.dq, b, t, h, d, f.Tq)
				}
				if j0 == begin {
					end := t + r1 - r0
					packRows(&f.q, b, h, d, t, end, at(q, (i0+r0)*dp), dp)
					packRows(&f.dy, b, h, d, t, end, at(dy, (i0+r0)*dp), dp)
					packRows(&f.y, b, h, d, t, end, at(dq, (i0+r0)*dp), dp)
					dotsAVX(&dotsArgs{x: at(dy, (i0+r0)*dp), y: at(dq, (i0+r0)*dp), out: at(delta, i0+r0), xRow: 4 * dp, yRow: 4 * dp, rows: r1 - r0, columns: dp})
					pre.add(&f.q, b, end, h, d, to)
					pre.add(&f.dy, b, end, h, d, to)
					pre.add(&f.y, b, end, h, d, to)
				}
				if i0+KeyTile >= hi {
					j := j0 // dk and dv will be written; or the next are read
					if !fresh(j0 + KeyTile) {
						j += KeyTile
					}
					pre.add(dkSum, b, j, g, d, keys)
					pre.add(dvSum, b, j, g, d, keys)
					pre.add(&f.v, b, j0+KeyTile, g, d, keys)
					pre.add(&f.k, b, j0+KeyTile, g, d, keys)
				}
				tileScores(lv, at(q, i0*dp), kt, p, r0, r1, w, d, dp, diagonal, &pre)
				tileScores(lv, at(dy, i0*dp), vt, ds, r0, r1, w, d, dp, diagonal, &pre)
				var grad *[KeyTile * KeyTile]float32
				if f.Cap != 0 {
					grad = new([KeyTile * KeyTile]float32)
				}
				scale := bound(unsafe.Slice(p, KeyTile*KeyTile), r0, r1, w, &see, base+i0, j0, f.scale, f.Cap, grad)
				scoreGrad(lv, &scoreGradArgs{scores: at(p, r0*KeyTile), dp: at(ds, r0*KeyTile),
					lse: &lse[t], delta: at(delta, i0+r0), rows: r1 - r0, scale: scale})
				if grad != nil {
					unbound(unsafe.Slice(ds, KeyTile*KeyTile), r0, r1, w, f.scale, grad)
				}

				tileKeyGrad(lv, p, at(dy, i0*dp), dv, r0, r1, w, dp, init, diagonal, &pre)
				tileKeyGrad(lv, ds, at(q, i0*dp), dk, r0, r1, w, dp, init, diagonal, &pre)
				init = 1

				p0, p1 := r0&^3, roundUp(r1, 4)
				args := productArgs{a: at(ds, p0*KeyTile), aRow: rowBytes, aK: 4, aBlock: 4 * rowBytes,
					b: k, bK: 4 * dp, c: at(dq, (i0+p0)*dp), cRow: 4 * dp, blocks: (p1 - p0) / 4, k: w, head: 3, init: 1}
				if diagonal {
					args.k, args.kStep, args.tail = p0+1, 4, 1
				}
				if j0 == begin {
					args.init = 0
				}
				pre.next(&args)
				product(lv, args, dp)
				if last {
					unpackRows(&f.dq, b, h, d, t, t+r1-r0, at(dq, (i0+r0)*dp), dp)
				}
			}
			if init == 0 { // no query of the block sees the tile, and none before did
				clear(unsafe.Slice(dk, w*dp))
				clear(unsafe.Slice(dv, w*dp))
			}
			unpackRows(dkSum, b, g, d, j0, j0+w, dk, dp)
			unpackRows(dvSum, b, g, d, j0, j0+w, dv, dp)
		}
		from = to
	}
	if dkSum != &f.dk && h%group == group-1 {
		f.settle(b, g, dkSum, dvSum)
	}
}

// tileKeyGrad adds to a tile of dk or dv (w keys) what queries [r0, r1) of a
// tile give: out[j] += Σ_r a[r][j]·rows[r], over the rows that see key j.
func tileKeyGrad(lv level.Level, a, rows, out fptr, r0, r1, w, dp, init int, diagonal bool, pre *ahead) {
	args := productArgs{a: at(a, r0*KeyTile), aRow: 4, aK: rowBytes, aBlock: 16, b: at(rows, r0*dp), bK: 4 * dp,
		c: out, cRow: 4 * dp, blocks: (w + 3) / 4, k: r1 - r0, head: 3, init: init}
	pre.next(&args)
	if !diagonal {
		product(lv, args, dp)
		return
	}
	// Key j's first query is row j, or r0 for the keys before it.
	j := 0
	for ; j < r0 && j < w; j += 4 {
		args.blocks, args.head = 1, min(3, r0-j)
		product(lv, args, dp)
		args.a, args.c = at(args.a, 4), at(args.c, 4*dp)
	}
	if j >= w {
		return
	}
	args.a, args.b, args.c = at(a, j*KeyTile+j), at(rows, j*dp), at(out, j*dp)
	args.aBlock, args.bBlock = 16+4*rowBytes, 16*dp
	args.blocks, args.k, args.kStep, args.head = (w-j+3)/4, r1-j, -4, 0
	product(lv, args, dp)
}
