package algotest

import "math"

// Number is number i of a rank: random, between 2⁻⁸ and 2¹² in magnitude, so that a sum
// over ranks depends on its order. Any part of a rank's numbers can be made alone, and
// fast under the race detector too.
func Number(rank int, i int64) float32 {
	h := uint64(rank)<<40 + uint64(i) + 1
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9 // splitmix64's finalizer
	h = (h ^ h>>27) * 0x94d049bb133111eb
	h ^= h >> 31
	exponent := 127 - 8 + h>>32%20
	return math.Float32frombits(uint32(h>>63<<31 | exponent<<23 | h&(1<<23-1)))
}

// Numbers are n numbers of a rank from number i on.
func Numbers(rank int, i, n int64) []float32 {
	v := make([]float32, n)
	for j := range v {
		v[j] = Number(rank, i+int64(j))
	}
	return v
}
