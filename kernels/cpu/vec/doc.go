// Package vec holds the CPU kernels that are not matrix products or attention:
// elementwise functions, normalisations, softmax and cross-entropy, embeddings,
// rotary positions, dropout, convolution's gather and scatter, optimizers, and
// sums over buffers.
//
// Every kernel is a struct whose exported fields are its arguments and whose Run
// method checks them, splits the work by shape alone and computes on a pool. A
// kernel value is meant to be kept and run again: Run allocates nothing. One value
// must not be run by two goroutines at once.
//
// Arrays are contiguous and row-major; (N, C) is N rows (tokens) of width C. Run
// returns an error that names the kernel, the field and the expected shape before
// it touches any element. Where an output may be one of the inputs, the field says
// so; in every other case outputs must not overlap inputs.
//
// # Numerics
//
// The float32 results are fixed bit for bit, at every SIMD level and number of
// threads (NaN results are NaN, of unspecified sign and payload):
//
//   - Sums along a row have 16 lanes; lane l takes the elements with index
//     ≡ l mod 16 in increasing order, products entering by a fused multiply-add;
//     then lanes l and l+8 are added, l and l+4, l+2, l+1.
//   - Sums down a column add in increasing row order.
//   - An Accumulate field makes a kernel add to its output. Elementwise and row
//     kernels add exactly the value that they would have written; column sums
//     continue from the old value.
//   - Exponential, sigmoid and the activations are package num's.
//
// The Go code of this package is generic over float32 and float64 and is the
// oracle of the assembly that asmgen/vec generates for AVX2 and AVX-512.
package vec
