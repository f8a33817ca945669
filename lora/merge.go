package lora

import "fmt"

// Product computes elements of Alpha/Rank · B·A of one adapter, or of its transpose.
type Product struct {
	left, right []float32 // (rows, r) and (r, cols)
	r, cols     int
	factor      float64
	sums        []float64 // accumulators of one row
}

// NewProduct returns the product for A (r,K) and B (N,r), row-major. The product is (N,K), or (K,N)
// if transposed, for a weight that is (in, out).
func NewProduct(o Options, a, b []float32, transposed bool) (*Product, error) {
	r := o.Rank
	if r < 1 || len(a)%r != 0 || len(b)%r != 0 {
		return nil, fmt.Errorf("lora: adapters of %d and %d elements with r %d", len(a), len(b), r)
	}
	p := &Product{left: b, right: a, r: r, factor: o.Factor()}
	if transposed {
		p.left, p.right = transpose(a, r), transpose(b, len(b)/r)
	}
	p.cols = len(p.right) / r
	return p, nil
}

// transpose returns the transpose of x, whose first dimension is rows.
func transpose(x []float32, rows int) []float32 {
	cols := len(x) / rows
	t := make([]float32, len(x))
	for i, v := range x {
		t[i%cols*rows+i/cols] = v
	}
	return t
}

// AddTo adds elements [start, start+len(w)) of the product to w: summed in float64, and
// rounded once.
func (p *Product) AddTo(w []float32, start int64) {
	if p.sums == nil {
		p.sums = make([]float64, p.cols)
	}
	for len(w) > 0 {
		row, col := int(start)/p.cols, int(start)%p.cols
		n := min(len(w), p.cols-col)
		sums := p.sums[:n]
		clear(sums)
		for k := range p.r {
			l := float64(p.left[row*p.r+k])
			for i, v := range p.right[k*p.cols+col:][:n] {
				sums[i] += l * float64(v)
			}
		}
		for i, s := range sums {
			w[i] = float32(float64(w[i]) + p.factor*s)
		}
		w, start = w[n:], start+int64(n)
	}
}
