package data

import "math/bits"

// permutation is a keyed bijection of [0, n) that needs no memory. It is a balanced Feistel network
// over the smallest even number of bits that holds n-1. at follows its cycle until the value is
// inside [0, n) (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, methods 2 and
// 3). The network's domain is under 4n, so this takes under 4 steps on average. The round function
// is SplitMix64's finalizer of the half and the round's key. It scrambles; it is not a cipher.
//
// Checkpoints depend on the mapping: it must never change for a given (seed, n). A test holds known
// values.
type permutation struct {
	n    uint64
	half uint // bits of a half
	keys [feistelRounds]uint64
}

// feistelRounds is twice the 4 rounds that Luby and Rackoff need, since a half may have only a few
// bits.
const feistelRounds = 8

func newPermutation(seed, n uint64) permutation {
	p := permutation{n: n, half: uint(max(bits.Len64(n-1)+1, 2) / 2)}
	state := seed
	for i := range p.keys {
		state += 0x9e3779b97f4a7c15
		p.keys[i] = mix64(state)
	}
	return p
}

// at returns the image of i, 0 ≤ i < n.
func (p *permutation) at(i uint64) uint64 {
	mask := uint64(1)<<p.half - 1
	for {
		l, r := i>>p.half, i&mask
		for _, key := range p.keys {
			l, r = r, l^(mix64(r+key)&mask)
		}
		i = l<<p.half | r
		if i < p.n {
			return i
		}
	}
}

// mix64 is SplitMix64's finalizer (Steele, Lea and Flood 2014).
func mix64(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}
