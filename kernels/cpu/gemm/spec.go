package gemm

import (
	"fmt"
	"math"
	"math/bits"
)

// KC is the depth of a block of K, the same for every shape and level: an
// element's bits depend on it.
const KC = 256

// Spec is the shape of a product C(M,N) = A(M,K)·B(K,N). Sizes are in elements.
type Spec struct {
	M, N, K int

	// TransA says that A is stored as (K,M), TransB that B is stored as (N,K).
	// C is always stored as (M,N). Rows are contiguous.
	TransA, TransB bool

	// LdA, LdB and LdC are the distances between rows as stored; 0 means that
	// the matrix has no gaps.
	LdA, LdB, LdC int

	// Accumulate adds the product to C instead of replacing it.
	Accumulate bool

	// Symmetric says that A·B, of float32, equals its own transpose bit for bit: B is Aᵀ, or A and
	// B are one symmetric matrix. Elements above the diagonal are copied from below instead of
	// computed. C is replaced (Accumulate off); an Epilogue keeps it symmetric, and sees
	// undefined elements above the diagonal, which are replaced by the copy.
	Symmetric bool

	// In is the type of A and B, Out that of C. Float inputs have any float
	// output, int8 inputs have I32; S8 also BF16 or F16, whose elements are scaled
	// (Product.RunScaled).
	In, Out Type

	// Portable widens bf16 inputs on every CPU, as where it has no instructions for them:
	// then their products have the same bits everywhere too.
	Portable bool
}

// scaled says that scales convert the int32 sums to 16-bit elements.
func (s *Spec) scaled() bool { return s.In == S8 && s.Out != I32 }

// Forward is y(tokens,out) = x(tokens,in)·W(in,out), or ·Wᵀ where W is stored
// (out,in).
func Forward(tokens, in, out int, outByIn bool) Spec {
	return Spec{M: tokens, N: out, K: in, TransB: outByIn}
}

// InputGradient is dx(tokens,in) = dy(tokens,out)·Wᵀ, W stored as in Forward.
func InputGradient(tokens, in, out int, outByIn bool) Spec {
	return Spec{M: tokens, N: in, K: out, TransB: !outByIn}
}

// WeightGradient is dW = xᵀ·dy (in,out), or dyᵀ·x (out,in) where W is stored
// (out,in): then dy is the product's A and x its B.
func WeightGradient(tokens, in, out int, outByIn bool) Spec {
	if outByIn {
		in, out = out, in
	}
	return Spec{M: in, N: out, K: tokens, TransA: true}
}

// stored returns the rows, columns and row distance of A, B and C in memory.
func (s *Spec) stored() [3]matrix {
	a := matrix{"A", "LdA", s.M, s.K, s.LdA}
	if s.TransA {
		a.rows, a.cols = s.K, s.M
	}
	b := matrix{"B", "LdB", s.K, s.N, s.LdB}
	if s.TransB {
		b.rows, b.cols = s.N, s.K
	}
	m := [3]matrix{a, b, {"C", "LdC", s.M, s.N, s.LdC}}
	for i := range m {
		if m[i].ld == 0 {
			m[i].ld = m[i].cols
		}
	}
	return m
}

type matrix struct {
	name, ldName   string
	rows, cols, ld int
}

// elements is the number of elements from the first to the last.
func (m *matrix) elements() int {
	if m.rows == 0 || m.cols == 0 {
		return 0
	}
	return (m.rows-1)*m.ld + m.cols
}

// holds returns an error if a slice of n elements is too short for m.
func (m *matrix) holds(n int) error {
	if n < m.elements() {
		return fmt.Errorf("gemm: %s has %d elements; %d rows of %d, %d apart, need %d", m.name, n, m.rows, m.cols, m.ld, m.elements())
	}
	return nil
}

func (s *Spec) holdsBias(given bool, n int) error {
	if given && s.Out == I32 {
		return fmt.Errorf("gemm: a bias on a product of %v: an i32 result takes none", s.In)
	}
	if given && n < s.N {
		return fmt.Errorf("gemm: bias has %d elements; N is %d", n, s.N)
	}
	return nil
}

// Validate returns an error that names the dimension that is wrong.
func (s *Spec) Validate() error {
	switch floats := s.Out == F32 || s.Out == BF16 || s.Out == F16; {
	case s.In > U8S8:
		return fmt.Errorf("gemm: In is %v; inputs are f32, bf16, f16, s8 or u8s8", s.In)
	case s.scaled() && s.Out != BF16 && s.Out != F16:
		return fmt.Errorf("gemm: Out is %v; a product of %v is i32, or scaled bf16 or f16", s.Out, s.In)
	case s.In == U8S8 && s.Out != I32:
		return fmt.Errorf("gemm: Out is %v; a product of %v is i32", s.Out, s.In)
	case !s.In.integer() && !floats:
		return fmt.Errorf("gemm: Out is %v; a product of %v is f32, bf16 or f16", s.Out, s.In)
	}
	for _, d := range [...]struct {
		name string
		n    int
	}{{"M", s.M}, {"N", s.N}, {"K", s.K}} {
		if d.n < 0 {
			return fmt.Errorf("gemm: %s is %d; a dimension is at least 0", d.name, d.n)
		}
	}
	if s.Symmetric && (s.M != s.N || s.Accumulate || s.In != F32 || s.Out != F32) {
		return fmt.Errorf("gemm: a symmetric product of %d rows and %d columns, %v to %v, Accumulate %v: it is square, replaces C and is of f32",
			s.M, s.N, s.In, s.Out, s.Accumulate)
	}
	for _, m := range s.stored() {
		if m.ld < m.cols {
			return fmt.Errorf("gemm: %s is %d; %s is stored in rows of %d elements, so it is at least that (or 0)", m.ldName, m.ld, m.name, m.cols)
		}
		hi, lo := bits.Mul64(uint64(m.rows), uint64(m.ld))
		if hi != 0 || lo > math.MaxInt/16 {
			return fmt.Errorf("gemm: %s of %d rows, %d elements apart, is larger than memory", m.name, m.rows, m.ld)
		}
	}
	return nil
}
