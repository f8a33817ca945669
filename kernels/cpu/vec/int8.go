package vec

import (
	"math"
	"math/bits"
	"unsafe"

	"github.com/spillway-ml/spillway/kernels/cpu/exact"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// Int8 is where quantised values lie in memory (graph.Quantize): Parts parts of Len
// numbers each, a part its codes and then a scale for each Block of them.
type Int8 struct {
	Q                 []byte
	Block, Len, Parts int
}

// Int8Floor is the least magnitude that a block's scale stands for, so that a block
// of zeros has a scale.
const Int8Floor = 0x1p-100

// size is the bytes of a part: scales begin at a multiple of theirs.
func (q *Int8) size() int { return (q.Len+3)/4*4 + q.Len/q.Block*4 }

// at returns the codes and scales of elements [lo, hi) of a part, lo at a block.
func (q *Int8) at(part, lo, hi int) (codes []byte, scales []float32) {
	size := q.size()
	p := q.Q[part*size : (part+1)*size]
	first := size - q.Len/q.Block*4 + lo/q.Block*4
	n := (hi - lo + q.Block - 1) / q.Block
	s := p[first : first+4*n]
	return p[lo:hi], unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(s))), n)
}

func (q *Int8) check(c *check) {
	c.positive("Block", q.Block)
	c.positive("Parts", q.Parts)
	c.dim("Len", q.Len)
	if c.err == nil && q.Len%q.Block != 0 {
		c.fail("Len is %d, want a multiple of Block %d", q.Len, q.Block)
	}
	if c.err == nil {
		c.size1("Q", "codes and scales", len(q.Q), q.Parts*q.size())
		if len(q.Q) > 0 && uintptr(unsafe.Pointer(unsafe.SliceData(q.Q)))%4 != 0 {
			c.fail("Q is not aligned to 4 bytes")
		}
	}
}

// Range is elements [Lo, Hi) of an operand.
type Range struct{ Lo, Hi int }

// cuts returns pieces of a part's elements [lo, hi) that are whole blocks, but for the
// last, of about a task each.
func (q *Int8) cuts(list []Range, lo, hi int) []Range {
	step := max(1, grain/q.Block) * q.Block
	for ; lo < hi; lo += step {
		list = append(list, Range{lo, min(lo+step, hi)})
	}
	return list
}

// Quantize8 quantises numbers. What is in none of the ranges has code 0: padding,
// whose content may be anything.
type Quantize8 struct {
	To Int8

	x      []float32
	x16    Half16
	pieces []Range // of x; each in one part, and from a block on
	empty  []Range // blocks without numbers
}

// NewQuantize8 prepares x, or x16 where x is nil, of Parts·Len numbers. Only ranges,
// in order and each from a block on, are numbers; nil: all are.
func NewQuantize8(to Int8, x []float32, x16 Half16, ranges []Range) (*Quantize8, error) {
	k := &Quantize8{To: to, x: x, x16: x16}
	c := check{op: "quantize"}
	to.check(&c)
	n := to.Len * to.Parts
	c.gradient("X", x, &k.x16, n)
	if c.err != nil {
		return nil, c.err
	}
	if ranges == nil {
		ranges = []Range{{0, n}}
	}
	at := 0
	byPart := func(list []Range, lo, hi int) []Range {
		for lo < hi {
			end := min(hi, (lo/to.Len+1)*to.Len)
			list = to.cuts(list, lo, end)
			lo = end
		}
		return list
	}
	for _, r := range ranges {
		if r.Lo%to.Block != 0 || r.Lo < at || r.Hi < r.Lo || r.Hi > n {
			c.fail("numbers %d to %d of %d, want ranges in order from multiples of %d", r.Lo, r.Hi, n, to.Block)
			return nil, c.err
		}
		k.empty = byPart(k.empty, at, r.Lo)
		k.pieces = byPart(k.pieces, r.Lo, r.Hi)
		at = tasks(r.Hi, to.Block) * to.Block
	}
	k.empty = byPart(k.empty, at, n)
	return k, nil
}

// Run quantises.
func (k *Quantize8) Run(p *pool.Pool) error {
	run(p, len(k.pieces)+len(k.empty), k)
	return nil
}

// RunIndex is a pool.Task's; call Run.
func (k *Quantize8) RunIndex(i int) {
	block := k.To.Block
	if i >= len(k.pieces) {
		r := k.empty[i-len(k.pieces)]
		codes, scales := k.To.at(r.Lo/k.To.Len, r.Lo%k.To.Len, r.Lo%k.To.Len+r.Hi-r.Lo)
		clear(codes)
		for j := range scales {
			scales[j] = Int8Floor / 127
		}
		return
	}
	r := k.pieces[i]
	part, at := r.Lo/k.To.Len, r.Lo%k.To.Len
	codes, scales := k.To.at(part, at, at+tasks(r.Hi-r.Lo, block)*block)
	s := borrow(block)
	defer s.giveBack()
	for b := range scales {
		lo, hi := r.Lo+b*block, min(r.Lo+(b+1)*block, r.Hi)
		x := s.buf[:hi-lo]
		if k.x == nil {
			widen(k.x16.As, x, k.x16.X[lo:hi])
		} else {
			x = k.x[lo:hi]
		}
		to := codes[b*block : (b+1)*block]
		scales[b] = quantize8(to[:hi-lo], x)
		clear(to[hi-lo:])
	}
}

// int8Infinity is the bits of the least magnitude that is not finite.
const int8Infinity = 0xff << 23

// int8Code is v·inverse, at most 127 in magnitude, to the nearest whole number: added
// to 3·2^22 a float32's low bits are the number.
func int8Code(v, inverse float32) byte {
	return byte(math.Float32bits(float32(v*inverse) + 3<<22))
}

// quantize8 writes the codes of a block and returns its scale.
func quantize8(codes []byte, x []float32) (scale float32) {
	top := math.Float32bits(Int8Floor)
	n := groups[float32](len(x))
	if n > 0 {
		top = max(top, math.Float32bits(simd.int8Top(ptr(x), n)))
	}
	for _, v := range x[n:] {
		top = max(top, math.Float32bits(v)&^(1<<31))
	}
	if top >= int8Infinity {
		clear(codes)
		return float32(math.NaN())
	}
	a := math.Float32frombits(top)
	inverse := 127 / a
	codes = codes[:len(x)]
	if n > 0 {
		simd.int8Codes(unsafe.SliceData(codes), ptr(x), n, inverse)
	}
	for i := n; i < len(x); i++ {
		codes[i] = int8Code(x[i], inverse)
	}
	return a / 127
}

// dequantize8 reads a block.
func dequantize8(x []float32, codes []byte, scale float32) {
	codes = codes[:len(x)]
	n := groups[float32](len(x))
	if n > 0 {
		simd.int8Read(ptr(x), unsafe.SliceData(codes), n, scale)
	}
	for i := n; i < len(x); i++ {
		x[i] = float32(int8(codes[i])) * scale
	}
}

// Int8Codes quantises and reads single blocks of up to any number of values, as Quantize8
// and Dequantize8 do.
type Int8Codes struct{}

// Quantize writes the codes of a block and returns its scale.
func (Int8Codes) Quantize(codes []byte, x []float32) (scale float32) { return quantize8(codes, x) }

// Dequantize reads a block.
func (Int8Codes) Dequantize(x []float32, codes []byte, scale float32) { dequantize8(x, codes, scale) }

// Dequantize8 reads quantised numbers: part behind part, or with Sum the sum of all
// parts in the tree's order (SumTree), in float32 and rounded once. Sequential, a sum
// goes from left to right, and from Y on if accumulating, over the parts in Present
// (nil: all).
type Dequantize8 struct {
	From Int8
	Sum  bool
	Y    []float32
	// Y16 takes the numbers where Y is nil, in the type As.
	Y16        []uint16
	As         Half
	Accumulate bool
	Sequential bool
	Present    []int // in order
	// Squares takes the squares of what a sequential sum adds, exactly, as sums of blocks
	// of 256, which From's are (exact.Limbs); nil: nobody does.
	Squares []int64

	pieces []Range // of Y
}

// Run reads.
func (k *Dequantize8) Run(p *pool.Pool) error {
	c := check{op: "dequantize"}
	k.From.check(&c)
	n := k.From.Len
	if !k.Sum {
		n *= k.From.Parts
	}
	if k.Y == nil {
		c.half("As", k.As)
		c.size1("Y16", "the numbers", len(k.Y16), n)
	} else {
		c.size1("Y", "the numbers", len(k.Y), n)
	}
	if c.err != nil {
		return c.err
	}
	if k.pieces == nil {
		for lo := 0; lo < n; lo += k.From.Len {
			k.pieces = k.From.cuts(k.pieces, lo, lo+k.From.Len)
		}
	}
	run(p, len(k.pieces), k)
	return nil
}

// RunIndex is a pool.Task's; call Run.
func (k *Dequantize8) RunIndex(i int) {
	r, block := k.pieces[i], k.From.Block
	first, parts := r.Lo/k.From.Len, 1
	if k.Sum {
		first, parts = 0, k.From.Parts
	}
	s := borrow(block * (2 + bits.Len(uint(parts))))
	defer s.giveBack()
	var limbs [exact.Limbs]int64
	acc := exact.Accumulator(limbs[:])
	for lo := r.Lo; lo < r.Hi; lo += block {
		hi := min(lo+block, r.Hi)
		sum := s.buf[:hi-lo]
		if k.Sum && k.Sequential {
			k.inOrder(sum, lo, hi, s.buf[block:], acc)
			continue
		}
		k.tree(sum, first, first+parts, lo%k.From.Len, s.buf[2*block:])
		if k.Accumulate {
			old := s.buf[block:][:hi-lo]
			if k.Y == nil {
				widen(k.As, old, k.Y16[lo:hi])
			} else {
				copy(old, k.Y[lo:hi])
			}
			for j, v := range old {
				sum[j] = v + sum[j]
			}
		}
		if k.Y == nil {
			narrow(k.As, k.Y16[lo:hi], sum)
		} else {
			copy(k.Y[lo:hi], sum)
		}
	}
	if k.Squares != nil {
		giveTo(k.Squares, acc)
	}
}

// inOrder adds the parts of elements [lo, hi) of Y, a block, one after the other, and
// their squares to acc; sum and rest are scratch.
func (k *Dequantize8) inOrder(sum []float32, lo, hi int, rest []float32, acc exact.Accumulator) {
	if k.Y != nil {
		sum = k.Y[lo:hi]
	} else if k.Accumulate {
		widen(k.As, sum, k.Y16[lo:hi])
	}
	x := rest[:len(sum)]
	n := k.From.Parts
	if k.Present != nil {
		n = len(k.Present)
	}
	for i := range n {
		p := i
		if k.Present != nil {
			p = k.Present[i]
		}
		codes, scales := k.From.at(p, lo, hi)
		if i == 0 && !k.Accumulate {
			dequantize8(sum, codes, scales[0])
			if k.Squares != nil {
				addSquares(acc, sum)
			}
			continue
		}
		dequantize8(x, codes, scales[0])
		if k.Squares != nil {
			addSquares(acc, x)
		}
		binary(Add, sum, sum, x, false)
	}
	if k.Y == nil {
		narrow(k.As, k.Y16[lo:hi], sum)
	}
}

// tree writes the sum of parts [from, to) of a block; rest is scratch.
func (k *Dequantize8) tree(sum []float32, from, to, at int, rest []float32) {
	if to-from == 1 {
		codes, scales := k.From.at(from, at, at+len(sum))
		dequantize8(sum, codes, scales[0])
		return
	}
	half := from + 1<<(bits.Len(uint(to-from-1))-1)
	k.tree(sum, from, half, at, rest)
	other := rest[:len(sum)]
	k.tree(other, half, to, at, rest[len(sum):])
	for i, v := range other {
		sum[i] += v
	}
}

// Int8Matrix quantises a matrix of 16-bit numbers for a product, by rows or by
// columns.
type Int8Matrix struct {
	X          []uint16 // (Rows, Cols)
	As         Half
	Rows, Cols int
	ByColumn   bool
	Codes      []byte    // (Rows, Cols)
	Scales     []float32 // (Rows), or (Cols) by column
}

// int8Columns is the columns of a task.
const int8Columns = 64

// Run quantises.
func (k *Int8Matrix) Run(p *pool.Pool) error {
	c := check{op: "quantize a matrix"}
	c.half("As", k.As)
	c.positive("Rows", k.Rows)
	c.positive("Cols", k.Cols)
	c.size2("X", "(Rows, Cols)", len(k.X), k.Rows, k.Cols)
	c.size2("Codes", "(Rows, Cols)", len(k.Codes), k.Rows, k.Cols)
	if k.ByColumn {
		c.size1("Scales", "Cols", len(k.Scales), k.Cols)
	} else {
		c.size1("Scales", "Rows", len(k.Scales), k.Rows)
	}
	if c.err != nil {
		return c.err
	}
	if k.ByColumn {
		run(p, tasks(k.Cols, int8Columns), k)
	} else {
		run(p, tasks(k.Rows, rowGrain(k.Cols)), k)
	}
	return nil
}

// RunIndex is a pool.Task's; call Run.
func (k *Int8Matrix) RunIndex(i int) {
	if k.ByColumn {
		k.columns(piece(i, int8Columns, k.Cols))
		return
	}
	s := borrow(k.Cols)
	defer s.giveBack()
	lo, hi := piece(i, rowGrain(k.Cols), k.Rows)
	for r := lo; r < hi; r++ {
		at, x := r*k.Cols, s.buf[:k.Cols]
		widen(k.As, x, k.X[at:at+k.Cols])
		k.Scales[r] = quantize8(k.Codes[at:at+k.Cols], x)
	}
}

// columns quantises columns [lo, hi).
func (k *Int8Matrix) columns(lo, hi int) {
	var tops [int8Columns]uint16
	var inverses [int8Columns]float32
	whole := simd.on && hi-lo == int8Columns
	x, codes := k.X[lo:], k.Codes[lo:]
	if whole {
		simd.int8ColumnTops(&tops[0], &x[0], k.Rows, 2*k.Cols)
	} else {
		for at := 0; at < len(x); at += k.Cols {
			for j, v := range x[at : at+hi-lo] {
				tops[j] = max(tops[j], v&0x7fff)
			}
		}
	}
	var magnitudes [int8Columns]float32
	widen(k.As, magnitudes[:], tops[:])
	finite := true
	for j := range hi - lo {
		a := max(Int8Floor, magnitudes[j])
		k.Scales[lo+j], inverses[j] = a/127, 127/a
		if !(a <= math.MaxFloat32) {
			k.Scales[lo+j], inverses[j], finite = float32(math.NaN()), 0, false
		}
	}
	if whole && finite {
		simd.int8ColumnCodes[k.As-BF16](&codes[0], &x[0], k.Rows, k.Cols, &inverses[0])
		return
	}
	s := borrow(int8Columns)
	defer s.giveBack()
	for at := 0; at < len(x); at += k.Cols {
		row := s.buf[:hi-lo]
		widen(k.As, row, x[at:at+hi-lo])
		for j, v := range row {
			codes[at+j] = 0
			if inverses[j] > 0 {
				codes[at+j] = int8Code(v, inverses[j])
			}
		}
	}
}
