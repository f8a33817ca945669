package algotest

import "math"

// Number returns number i of a rank. It is random, between 2⁻⁸ and 2¹² in magnitude, so that a sum
// over ranks depends on its order. Any number can be made separately, and fast even under the race
// detector.
func Number(rank int, i int64) float32 {
	h := uint64(rank)<<40 + uint64(i) + 1
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9 // splitmix64's finalizer
	h = (h ^ h>>27) * 0x94d049bb133111eb
	h ^= h >> 31
	exponent := 127 - 8 + h>>32%20
	return math.Float32frombits(uint32(h>>63<<31 | exponent<<23 | h&(1<<23-1)))
}

// Numbers returns n numbers of a rank, beginning with number i.
func Numbers(rank int, i, n int64) []float32 {
	v := make([]float32, n)
	for j := range v {
		v[j] = Number(rank, i+int64(j))
	}
	return v
}
