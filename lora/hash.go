package lora

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"maps"
	"math"
	"slices"
)

// BaseHash identifies the model that adapters belong to. It is the SHA-256 of a line "NAME
// SHA256" for each parameter, in the byte order of names. A parameter's hash is of its values
// as little-endian f32, before they are rounded to the stored type.
type BaseHash struct {
	of map[string]hash.Hash
}

// Add hashes the next values of a parameter.
func (b *BaseHash) Add(name string, v []float32) {
	if b.of == nil {
		b.of = map[string]hash.Hash{}
	}
	h := b.of[name]
	if h == nil {
		h = sha256.New()
		b.of[name] = h
	}
	var block [4 << 10]byte
	for len(v) > 0 {
		n := min(len(v), len(block)/4)
		for i, x := range v[:n] {
			bits := math.Float32bits(x)
			block[4*i], block[4*i+1], block[4*i+2], block[4*i+3] = byte(bits), byte(bits>>8), byte(bits>>16), byte(bits>>24)
		}
		_, _ = h.Write(block[:4*n]) // never fails
		v = v[n:]
	}
}

// Sum returns the hash of all added parameters, in hexadecimal digits.
func (b *BaseHash) Sum() string {
	all := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(b.of)) {
		fmt.Fprintf(all, "%s %x\n", name, b.of[name].Sum(nil))
	}
	return hex.EncodeToString(all.Sum(nil))
}
