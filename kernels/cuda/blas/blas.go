// Package blas runs matrix products on the GPU. Its interface Library is implemented by
// cuBLASLt, which is opened at run time, and by a test double.
//
// Matrices are row-major. A product is bound once, to shapes and addresses; the library
// then chooses its algorithm from the shapes, the types, the workspace size and a fixed
// alignment. The choice must not depend on anything else, such as addresses: a memory plan
// that only moves buffers must not change the results.
package blas

import (
	"errors"
	"fmt"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
)

// Align is the minimum alignment of operands in bytes, which an algorithm may rely on;
// WorkAlign is the alignment of the workspace.
const (
	Align     = 16
	WorkAlign = 256
	AuxLd     = 8 // the row length of aux is a multiple of this, in elements
)

// ErrUnsupported says that the library has no algorithm for a product.
var ErrUnsupported = errors.New("no algorithm")

// Matrix describes how an operand is stored.
type Matrix struct {
	Type  graph.DType // F32, BF16 or F16
	Trans bool        // stored transposed
	Ld    int64       // stride from one stored row to the next, in elements
}

// Side names one of the two factors of a product.
type Side uint8

// Values of Product.Sums: the factor whose sums over K the product writes.
const (
	NoSums Side = iota
	SumsA       // of op(A): (M)
	SumsB       // of op(B): (N)
)

// Product describes a matrix product with an optional epilogue. P = op(A)·op(B):
//
//	plain       C = P
//	Accumulate  C += P
//	Bias        C = P + bias in every row
//	GELU        aux = P, or P + bias with Bias; C = gelu(aux before rounding)
//	DGELU       C = P·gelu'(aux), element by element
//
// GELU is the tanh approximation. Sums also writes, never adds, the sums of one factor over
// K, in C's type. Shapes are A (M,K) and B (K,N) after op, C (M,N), bias (N) and aux (M,N)
// without padding, both of C's type. A and B have the same type; C has it too, or F32.
// Accumulation is in fp32 with TF32 off. C and aux are each rounded once, C after adding its
// old value if Accumulate is set.
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

// Places holds the addresses of a product's operands. Bias, Aux, Sums and Work are 0 if
// absent.
type Places struct{ A, B, C, Bias, Aux, Sums, Work driver.Address }

// Call is a product bound to the addresses of its operands.
type Call interface {
	// Enqueue adds the product to a stream. It allocates nothing.
	Enqueue(s driver.Stream) error
}

// Library computes matrix products in one CUDA context, which must be current on the
// caller's thread. Bind may be called from several threads.
type Library interface {
	// Bind chooses the algorithm. The error is ErrUnsupported if the library has none.
	Bind(p Product, at Places) (Call, error)
	// Close releases the library. No bound product may still be running.
	Close() error
}

// Elems returns how many elements the storage of a matrix spans, from its first to its
// last, padding between rows included. rows and cols are its shape after op.
func (m Matrix) Elems(rows, cols int64) int64 {
	if m.Trans {
		rows, cols = cols, rows
	}
	return (rows-1)*m.Ld + cols
}

// SumsLen is the number of sums over K that a product writes: M, N or 0.
func (p Product) SumsLen() int64 {
	switch p.Sums {
	case SumsA:
		return p.M
	case SumsB:
		return p.N
	}
	return 0
}

// Validate returns an error for a product or addresses that no Library supports.
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
		return errors.New("product: Bias and Accumulate cannot both be set")
	case p.DGELU && (p.Bias || p.Accumulate):
		return errors.New("product: DGELU goes with neither Bias nor Accumulate")
	case p.GELU && (p.DGELU || p.Accumulate):
		return errors.New("product: GELU goes with neither DGELU nor Accumulate")
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
