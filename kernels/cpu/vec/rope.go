package vec

import (
	"math"

	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// RopeTable computes the rotations of Rope for the positions [0, Seq), or At: for each
// position D/2 cosines, then D/2 sines of position·Theta^(-2i/D), computed in
// float64 and rounded once. With Factor not 0 frequencies are scaled as Llama 3.1
// does (Hugging Face's rope_type "llama3"): those with a wavelength above
// Original/LowFreq are divided by Factor, those below Original/HighFreq stay, and
// between the two the change is smooth.
type RopeTable[T num.Float] struct {
	Seq, D int     // D: width of a head, even
	At     []int32 // the positions, Seq of them; nil: 0, 1, 2 …
	Theta  float64
	Table  []T // (Seq, D)

	Factor, LowFreq, HighFreq float64
	Original                  float64 // positions of the original training
}

// Run fills the table.
func (k *RopeTable[T]) Run(p *pool.Pool) error {
	c := check{op: "rope table"}
	c.dim("Seq", k.Seq)
	c.even("D", k.D)
	c.size2("Table", "(Seq, D)", len(k.Table), k.Seq, k.D)
	if k.At != nil && len(k.At) != k.Seq {
		c.fail("At has %d positions, want Seq = %d", len(k.At), k.Seq)
	}
	if !(k.Theta > 0) {
		c.fail("Theta is %g, want above 0", k.Theta)
	}
	if k.Factor != 0 && !(k.Factor >= 1 && k.LowFreq > 0 && k.HighFreq > k.LowFreq && k.Original > 0) {
		c.fail("scaling has Factor %g, LowFreq %g, HighFreq %g, Original %g; want Factor at least 1, 0 < LowFreq < HighFreq, Original above 0",
			k.Factor, k.LowFreq, k.HighFreq, k.Original)
	}
	return c.run(p, tasks(k.Seq, ropeGrain), k)
}

// even refuses a width that has no halves.
func (c *check) even(name string, v int) {
	if v < 2 || v%2 != 0 {
		c.fail("%s is %d, want even and at least 2", name, v)
	}
}

// ropeGrain is the number of positions of one task.
const ropeGrain = 64

// RunIndex is a pool.Task's; call Run.
func (k *RopeTable[T]) RunIndex(i int) {
	lo, hi := piece(i, ropeGrain, k.Seq)
	for j := range k.D / 2 {
		f := k.frequency(j)
		for t := lo; t < hi; t++ {
			at := t
			if k.At != nil {
				at = int(k.At[t])
			}
			sin, cos := num.Sincos(float64(float64(at) * f))
			k.Table[t*k.D+j] = T(cos)
			k.Table[t*k.D+k.D/2+j] = T(sin)
		}
	}
}

// frequency returns the radians per position of pair i.
func (k *RopeTable[T]) frequency(i int) float64 {
	f := num.Pow(k.Theta, float64(-2*i)/float64(k.D))
	if k.Factor == 0 {
		return f
	}
	wave := 2 * math.Pi / f
	switch {
	case wave > k.Original/k.LowFreq:
		return f / k.Factor
	case wave >= k.Original/k.HighFreq:
		s := (k.Original/wave - k.LowFreq) / (k.HighFreq - k.LowFreq)
		return float64((1-s)*(f/k.Factor)) + float64(s*f)
	}
	return f
}

// Rope rotates the pairs (x[i], x[i+D/2]) of every head by the angle of the row's
// position (Su et al., "RoFormer", 2021, in Hugging Face's half-split
// form):
//
//	y[i] = x[i]·cos - x[i+D/2]·sin, y[i+D/2] = x[i+D/2]·cos + x[i]·sin
//
// Inverse rotates back, which is also the gradient. Y may be X.
type Rope[T num.Float] struct {
	N, Heads, D, Seq int
	X, Y             []T // (N, Heads·D)
	Table            []T // (Seq, D), of RopeTable
	Starts           []T // as AddPos's
	Inverse          bool
}

// Run rotates.
func (k *Rope[T]) Run(p *pool.Pool) error {
	c := check{op: "rope"}
	c.dim("N", k.N)
	c.positive("Heads", k.Heads)
	c.even("D", k.D)
	c.positive("Seq", k.Seq)
	c.size4("X", "(N, Heads, D, 1)", len(k.X), k.N, k.Heads, k.D, 1)
	c.size4("Y", "(N, Heads, D, 1)", len(k.Y), k.N, k.Heads, k.D, 1)
	c.size2("Table", "(Seq, D)", len(k.Table), k.Seq, k.D)
	c.starts(len(k.Starts), k.N)
	return c.run(p, tasks(k.N, rowGrain(k.Heads*k.D)), k)
}

// RunIndex is a pool.Task's; call Run.
func (k *Rope[T]) RunIndex(i int) {
	w, h := k.Heads*k.D, k.D/2
	lo, hi := piece(i, rowGrain(w), k.N)
	for n := lo; n < hi; n++ {
		t := position(n, 0, k.Seq, k.Starts)
		cos, sin := k.Table[t*k.D:t*k.D+h], k.Table[t*k.D+h:(t+1)*k.D]
		for o := n * w; o < (n+1)*w; o += k.D {
			rotate(k.Y[o:o+h], k.Y[o+h:o+k.D], k.X[o:o+h], k.X[o+h:o+k.D], cos, sin, k.Inverse)
		}
	}
}

func rotate[T num.Float](y1, y2, x1, x2, cos, sin []T, inverse bool) {
	if m := groups[T](len(x1)); m > 0 {
		simd.rotate[index(inverse)](ptr(y1), ptr(y2), ptr(x1), ptr(x2), ptr(cos), ptr(sin), m)
		y1, y2, x1, x2, cos, sin = y1[m:], y2[m:], x1[m:], x2[m:], cos[m:], sin[m:]
	}
	for i, a := range x1 {
		b, c, s := x2[i], cos[i], sin[i]
		if inverse {
			s = -s
		}
		y1[i] = num.Fma(-b, s, T(a*c))
		y2[i] = num.Fma(a, s, T(b*c))
	}
}
