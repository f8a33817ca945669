package data

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
)

// Fingerprint identifies a stream of tokens, independently of its files and tokenizer.
type Fingerprint struct {
	Tokens int64  `json:"tokens"`
	SHA256 string `json:"sha256"` // hexadecimal, see FingerprintOf
}

const (
	fingerprintBlock  = 1 << 14 // tokens
	fingerprintBlocks = 1 << 10
)

// FingerprintOf hashes the tokens of src, and its targets if it has separate ones, as little-endian
// int32, after their number as an int64. Of more than 2^24 tokens it reads only 1,024 blocks of
// 16,384, evenly spaced from the first to the last, so that starting a run does not read a complete
// large corpus.
func FingerprintOf(src Source) (Fingerprint, error) {
	n := src.Len()
	h := sha256.New()
	bytes := binary.LittleEndian.AppendUint64(nil, uint64(n))
	_, _ = h.Write(bytes) // a hash never fails
	tokens := make([]int32, fingerprintBlock)
	blocks := (n + fingerprintBlock - 1) / fingerprintBlock
	start := func(i int64) int64 { return i * fingerprintBlock }
	if blocks > fingerprintBlocks {
		blocks = fingerprintBlocks
		// The start is computed in two parts: a product of i and n would overflow from 2^53
		// tokens on.
		gap, rest := (n-fingerprintBlock)/(blocks-1), (n-fingerprintBlock)%(blocks-1)
		start = func(i int64) int64 { return i*gap + i*rest/(blocks-1) }
	}
	reads := []func([]int32, int64) error{src.Tokens}
	if s, ok := src.(TargetSource); ok {
		reads = append(reads, s.Targets)
	}
	for i := range blocks {
		at := start(i)
		part := tokens[:min(fingerprintBlock, n-at)]
		for _, read := range reads {
			if err := read(part, at); err != nil {
				return Fingerprint{}, err
			}
			bytes = bytes[:0]
			for _, t := range part {
				bytes = binary.LittleEndian.AppendUint32(bytes, uint32(t))
			}
			_, _ = h.Write(bytes)
		}
	}
	return Fingerprint{n, hex.EncodeToString(h.Sum(nil))}, nil
}
