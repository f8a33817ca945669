package num

import (
	"math"
	"math/bits"
)

// Philox is the counter-based generator Philox4x32-10 (Salmon, Moraes, Dror and
// Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011): 128 random bits
// that are a pure function of counter and key.
func Philox(c [4]uint32, k [2]uint32) [4]uint32 {
	const m0, m1 = 0xD2511F53, 0xCD9E8D57
	const w0, w1 = 0x9E3779B9, 0xBB67AE85
	// Scalars, as the compiler keeps an array that is written to in memory.
	c0, c1, c2, c3, k0, k1 := c[0], c[1], c[2], c[3], k[0], k[1]
	for range 10 {
		h0, l0 := bits.Mul32(m0, c0)
		h1, l1 := bits.Mul32(m1, c2)
		c0, c1, c2, c3 = h1^c1^k0, l1, h0^c3^k1, l0
		k0 += w0
		k1 += w1
	}
	return [4]uint32{c0, c1, c2, c3}
}

// uniforms returns two numbers of 53 random bits for a counter: the first in
// (0, 1], the second in [0, 1).
func uniforms(seed, stream, counter uint64) (u1, u2 float64) {
	r := Philox([4]uint32{uint32(counter), uint32(counter >> 32), uint32(stream), uint32(stream >> 32)},
		[2]uint32{uint32(seed), uint32(seed >> 32)})
	a := uint64(r[1])<<32 | uint64(r[0])
	b := uint64(r[3])<<32 | uint64(r[2])
	return float64(a>>11+1) * (1.0 / (1 << 53)), float64(b>>11) * (1.0 / (1 << 53))
}

// normalPair returns numbers 2i and 2i+1 of a stream.
func normalPair(seed, stream, i uint64) (a, b float64) {
	u1, u2 := uniforms(seed, stream, i)
	r := math.Sqrt(float64(-2 * Log(u1)))
	s, c := Sincos(float64(2 * math.Pi * u2))
	return float64(r * c), float64(r * s)
}

// FillNormal sets dst[i] to std times the (first+i)-th standard normal number of a stream: Box
// and Muller's transform (1958) of Philox's bits. A number is a pure function of its index with the
// same bits on every machine, so a parameter's initial value depends on the seed, the parameter
// (stream: a hash of its name) and the element's index, never on how the parameter is sharded.
func FillNormal(dst []float32, std float64, seed, stream, first uint64) {
	for i := 0; i < len(dst); {
		n := first + uint64(i)
		a, b := normalPair(seed, stream, n/2)
		if n%2 == 0 {
			dst[i] = float32(float64(std * a))
			if i++; i == len(dst) {
				return
			}
		}
		dst[i] = float32(float64(std * b))
		i++
	}
}

// Uniform returns the index-th number of a stream, uniform in [0, 1).
func Uniform(seed, stream, index uint64) float64 {
	_, u := uniforms(seed, stream, index)
	return u
}

// Stream returns the stream of a name: its 64-bit FNV-1a hash.
func Stream(name string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(name) {
		h = (h ^ uint64(name[i])) * 1099511628211
	}
	return h
}

// Rounding returns the random bits of stochastic rounding for elements 2i and 2i+1 of
// a parameter (stream: of its name) in an update: three numbers of 16 bits each, for
// the parameter and its two moments.
func Rounding(seed, stream, i, update uint64) (even, odd [3]uint16) {
	r := Philox([4]uint32{uint32(i), uint32(update), uint32(stream), uint32(stream >> 32)},
		[2]uint32{uint32(seed), uint32(seed>>32) ^ uint32(i>>32)<<21})
	return [3]uint16{uint16(r[0]), uint16(r[0] >> 16), uint16(r[1])}, [3]uint16{uint16(r[1] >> 16), uint16(r[2]), uint16(r[2] >> 16)}
}

// StochasticBF16 rounds x to one of the two bfloat16 around it: away from zero where
// the 16 bits that fall away and as many random ones have a sum of 2^16 or more. The
// mean over the random bits is x. What is not finite stays so.
func StochasticBF16(x float32, random uint16) uint16 {
	b := math.Float32bits(x)
	if b&0x7f800000 == 0x7f800000 {
		return BF16(x)
	}
	return uint16((b + uint32(random)) >> 16)
}
