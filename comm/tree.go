package comm

// Number is an element type of sums over ranks.
type Number interface{ float32 | float64 | int64 }

// block is the number of elements that are summed at a time: the partial sums of a block
// stay in the L1 cache.
const block = 1024

// Adder sums over ranks in the fixed order: a binary tree over the rank index,
// sum(0..n) = sum(0..p) + sum(p..n) with p the largest power of two below n, in
// plain adds of T. One Adder serves one goroutine; it holds the scratch of the
// partial sums.
type Adder[T Number] struct {
	partial [][block]T
}

// NewAdder returns an Adder for up to ranks sources.
func NewAdder[T Number](ranks int) *Adder[T] {
	levels := 1
	for n := 1; n < ranks; n *= 2 {
		levels++
	}
	return &Adder[T]{partial: make([][block]T, levels)}
}

// Sum writes the tree sum of srcs, element by element, to dst, or adds it to
// dst: dst = dst + sum. dst may be one of srcs; all have dst's length.
func (a *Adder[T]) Sum(dst []T, srcs [][]T, accumulate bool) {
	for at := 0; at < len(dst); at += block {
		n := min(block, len(dst)-at)
		sum := a.tree(srcs, at, n, 0)
		d := dst[at : at+n]
		if accumulate {
			for i, v := range sum {
				d[i] += v
			}
		} else {
			copy(d, sum)
		}
	}
}

// SumAll replaces every slice of bufs by their tree sum.
func (a *Adder[T]) SumAll(bufs [][]T) {
	for at := 0; at < len(bufs[0]); at += block {
		n := min(block, len(bufs[0])-at)
		sum := a.tree(bufs, at, n, 0)
		for _, b := range bufs {
			copy(b[at:at+n], sum)
		}
	}
}

// tree returns the sum of elements [at, at+n) of srcs. The result is in partial[level], or in the
// source itself if there is only one.
func (a *Adder[T]) tree(srcs [][]T, at, n, level int) []T {
	if len(srcs) == 1 {
		return srcs[0][at : at+n]
	}
	p := 1
	for 2*p < len(srcs) {
		p *= 2
	}
	// The left sum may be in partial[level], where the result replaces it. The right sum must not
	// use partial[level].
	left := a.tree(srcs[:p], at, n, level)
	right := a.tree(srcs[p:], at, n, level+1)
	out := a.partial[level][:n]
	right = right[:len(out)]
	left = left[:len(out)]
	for i := range out {
		out[i] = left[i] + right[i]
	}
	return out
}
