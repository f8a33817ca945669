// Package gemm multiplies matrices on the CPU device.
//
// # What an element of a product is
//
// C(M,N) = A(M,K)·B(K,N) in float32 is defined element by element, so that it
// has the same bits at every SIMD level, for every split into tiles and
// threads, and for every M and N. K is cut into blocks of KC. In a block the
// products are summed by a chain of fused multiply-adds, k increasing, that
// starts at +0; the blocks' sums are added in order:
//
//	c = ((block0 + block1) + block2) + …            Accumulate off
//	c = ((old + block0) + block1) + …               Accumulate on
//
// Then the bias of the column is added, then the Epilogue sees the finished
// tile. A product over rows or columns of C in pieces equals the whole product;
// so does an accumulated product over pieces of K cut at multiples of KC.
//
// NaN and infinities propagate as IEEE 754 says: no product is skipped, also
// not by a zero. Which NaN it is (sign, payload) is not defined.
//
// # Other types
//
// binary16 inputs, and bf16 inputs where the CPU has no instructions for them,
// are widened: their product is that of float32, with the same bits. Dot-product
// instructions for bf16 (AVX-512's and AMX's) round as they do, and make
// subnormals zero: their result depends on K alone too, but not the same on
// every CPU; Spec.Portable does without them. A 16-bit output is rounded once, from the float32 sum. Products of
// bytes are exact in int32, modulo 2^32.
//
// # How it is computed
//
// As in Goto and van de Geijn, "Anatomy of High-Performance Matrix
// Multiplication" (2008), and BLIS: A and B are copied into slivers of mr rows
// and nr columns so that the micro-kernel reads both in order, and an mr×nr
// tile of C stays in registers over a block of K. A chunk of at most
// chunkRows×chunkCols×chunkDepth is packed, then computed in tiles; each step
// is a pool.Task, its indices are strips and tiles. Sizes depend on the shape
// alone. A thread alone computes the tiles in order, so that the first of a strip
// packs it; at AVX-512 the float32 kernel writes B's slivers while it computes by them.
// In tile registers (AMX) a tile of 32×32 stays over the whole depth of a chunk.
package gemm
