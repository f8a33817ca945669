// Package blas is the matrix product of the GPU: an interface that cuBLASLt
// implements, opened at run time, and a double in tests.
//
// Matrices are row-major. A product is bound once, to shapes and addresses; the
// library chooses its algorithm then, from the shapes, the types, the size of
// the workspace and an alignment that is the same for all. The choice depends on
// nothing that a plan may change without changing the numbers.
package blas

import (
	"errors"
	"fmt"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

// Align is the alignment of operands in bytes that an algorithm may count on;
// WorkAlign that of the workspace.
const (
	Align     = 16
	WorkAlign = 256
	AuxLd     = 8 // elements that the rows of aux are a multiple of
)

// ErrUnsupported says that the library has no algorithm for a product.
var ErrUnsupported = errors.New("no algorithm")

// Matrix is how an operand is stored.
type Matrix struct {
	Type  graph.DType // F32, BF16 or F16
	Trans bool        // rows and columns change places in memory
	Ld    int64       // elements from one stored row to the next
}

// Side is a factor of a product.
type Side uint8

// Factors whose sums over K a product may write.
const (
	NoSums Side = iota
	SumsA       // of op(A): (M)
	SumsB       // of op(B): (N)
)

// Product is C = op(A)·op(B), C += that, or with Bias C = op(A)·op(B) + bias in
// every row; with DGELU C = op(A)·op(B)·gelu'(aux), of the form of GELU with tanh, taken
// element by element before C is rounded; with GELU aux = op(A)·op(B), with Bias that + bias,
// and C the GELU of it in that form, taken before the sum is rounded: each is rounded once.
// With Sums it also writes, never adds, the sums of a factor over K, of C's type. A is (M,K)
// after op, B (K,N), C (M,N), the bias (N) and aux (M,N), whose rows lie next to each other,
// of C's type. A and B have one type;
// C has it too, or F32. Sums are fp32; TF32 is off. C is rounded once, and with Accumulate
// after adding what was there.
type Product struct {
	M, N, K    int64
	A, B, C    Matrix
	Bias       bool
	GELU       bool
	DGELU      bool
	Sums       Side
	Accumulate bool
	Workspace  int64 // bytes that the library may use
}

// Places are where the operands of a product lie. Bias, Aux, Sums and Work are 0 for none.
type Places struct{ A, B, C, Bias, Aux, Sums, Work driver.Address }

// Call is a product with its operands.
type Call interface {
	// Enqueue adds it to a stream. It allocates nothing.
	Enqueue(s driver.Stream) error
}

// Library is a library of products for one context, which is current on the
// caller's thread. Bind may be called from several threads.
type Library interface {
	// Bind chooses the algorithm. The error is ErrUnsupported where there is none.
	Bind(p Product, at Places) (Call, error)
	// Close ends the library, once nothing that was bound runs any more.
	Close() error
}

// Elems returns the elements from a matrix's first to its last, stored as rows
// by cols after op.
func (m Matrix) Elems(rows, cols int64) int64 {
	if m.Trans {
		rows, cols = cols, rows
	}
	return (rows-1)*m.Ld + cols
}

// SumsLen is how many sums a product writes.
func (p Product) SumsLen() int64 {
	switch p.Sums {
	case SumsA:
		return p.M
	case SumsB:
		return p.N
	}
	return 0
}

// Validate refuses what no library could compute.
func (p Product) Validate(at Places) error {
	if p.M < 1 || p.N < 1 || p.K < 1 {
		return fmt.Errorf("product: C (%d,%d) over %d: sizes are at least 1", p.M, p.N, p.K)
	}
	for _, m := range []struct {
		name       string
		m          Matrix
		rows, cols int64
		at         driver.Address
	}{{"A", p.A, p.M, p.K, at.A}, {"B", p.B, p.K, p.N, at.B}, {"C", p.C, p.M, p.N, at.C}} {
		cols := m.cols
		if m.m.Trans {
			cols = m.rows
		}
		switch {
		case m.m.Ld < cols:
			return fmt.Errorf("product: rows of %s have %d elements and are %d apart", m.name, cols, m.m.Ld)
		case m.at == 0 || m.at%Align != 0:
			return fmt.Errorf("product: %s is at %#x, want a multiple of %d", m.name, uint64(m.at), Align)
		}
	}
	if p.C.Trans {
		return errors.New("product: C is transposed; change A and B instead")
	}
	a, b, c := p.A.Type, p.B.Type, p.C.Type
	if a != b || a != graph.F32 && a != graph.BF16 && a != graph.F16 || c != a && c != graph.F32 {
		return fmt.Errorf("product: A is %v, B %v and C %v; want f32 throughout, or bf16 or f16 with C of that type or f32", a, b, c)
	}
	switch {
	case p.Bias && p.Accumulate:
		return errors.New("product: a bias and what is there cannot both be added")
	case p.DGELU && (p.Bias || p.Accumulate):
		return errors.New("product: a derivative is of the product alone, without a bias and what is there")
	case p.GELU && (p.DGELU || p.Accumulate):
		return errors.New("product: GELU is of the product and a bias, without its derivative and what is there")
	case (p.GELU || p.DGELU) && (c == graph.F32 || p.N%AuxLd != 0):
		return fmt.Errorf("product: %s over rows of %d elements of %v; want bf16 or f16, and a multiple of %d", p.epilogue(), p.N, c, AuxLd)
	case p.Sums > SumsB:
		return fmt.Errorf("product: sums of factor %d; a product has two", p.Sums)
	case p.Sums != NoSums && (p.Bias || p.GELU || p.DGELU):
		return errors.New("product: sums of a factor go with no bias, GELU or derivative")
	case p.Sums != NoSums && (at.Sums == 0 || at.Sums%Align != 0):
		return fmt.Errorf("product: the sums are at %#x, want a multiple of %d", uint64(at.Sums), Align)
	case (p.GELU || p.DGELU) && (at.Aux == 0 || at.Aux%Align != 0):
		return fmt.Errorf("product: aux is at %#x, want a multiple of %d", uint64(at.Aux), Align)
	case p.Bias && (at.Bias == 0 || at.Bias%Align != 0):
		return fmt.Errorf("product: the bias is at %#x, want a multiple of %d", uint64(at.Bias), Align)
	case p.Workspace < 0 || p.Workspace > 0 && (at.Work == 0 || at.Work%WorkAlign != 0):
		return fmt.Errorf("product: %d bytes of workspace at %#x, want a multiple of %d", p.Workspace, uint64(at.Work), WorkAlign)
	}
	return nil
}
