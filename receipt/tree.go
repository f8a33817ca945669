// Package receipt is the hash chain of a run: the contents of its lines, the file, and the hash
// tree over the states.
//
// The tree does not depend on the number of ranks. A block is 256 stored elements of one state
// of a tensor; shards never split a block. A range is 256 blocks: 65,536 elements. A range's
// hash is the hash of its blocks' hashes, so ranks that share a range exchange only hashes. The
// root is the hash of all ranges of all states with their names.
package receipt

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
)

const (
	// BlockElems is the number of elements in a block.
	BlockElems = 256
	// RangeBlocks is the number of blocks in a range.
	RangeBlocks = 256
	// RangeElems is the number of elements in a range.
	RangeElems = BlockElems * RangeBlocks
	// Size is the size of a hash in bytes.
	Size = sha256.Size
)

// Tensor identifies one state of a tensor.
type Tensor struct {
	Name  string `json:"name"`
	State string `json:"state"`
	DType string `json:"dtype"`
	Elems int64  `json:"elements"`
}

// Ranges returns the number of ranges of the state.
func (t *Tensor) Ranges() int64 { return (t.Elems + RangeElems - 1) / RangeElems }

// Blocks returns the number of blocks of the state.
func (t *Tensor) Blocks() int64 { return (t.Elems + BlockElems - 1) / BlockElems }

func (t *Tensor) String() string { return fmt.Sprintf("%s of %q", t.State, t.Name) }

// AppendBlocks appends the hashes of consecutive blocks; block is the size of one in bytes. For
// 8-bit values, scales has 4 bytes a block, which are hashed after the codes.
func AppendBlocks(to, data []byte, block int64, scales []byte) []byte {
	var h hash.Hash
	if scales != nil {
		h = sha256.New()
	}
	for n := int64(0); len(data) > 0; n++ {
		part := data[:min(block, int64(len(data)))]
		data = data[len(part):]
		if h == nil {
			sum := sha256.Sum256(part)
			to = append(to, sum[:]...)
			continue
		}
		h.Reset()
		_, _ = h.Write(part) // a hash never fails
		_, _ = h.Write(scales[4*n : 4*n+4])
		to = h.Sum(to)
	}
	return to
}

// Range returns the hash of a range, from the hashes of its blocks.
func Range(blocks []byte) [Size]byte { return sha256.Sum256(blocks) }

// Root returns the root hash of states. ranges has, for each state, the hashes of its ranges.
func Root(tensors []Tensor, ranges [][]byte) string {
	h := sha256.New()
	for i := range tensors {
		t := &tensors[i]
		fmt.Fprintf(h, "%d %s %d %s %s %d\n", len(t.State), t.State, len(t.Name), t.Name, t.DType, t.Elems)
		_, _ = h.Write(ranges[i])
	}
	return hex.EncodeToString(h.Sum(nil))
}

// Place is the first differing range of a state, and the number of other differing ranges.
type Place struct {
	Tensor
	From, To int64 // elements
	More     int64 // other ranges that differ
}

func (p *Place) String() string {
	s := fmt.Sprintf("%s, elements %d to %d", p.Tensor.String(), p.From, p.To-1)
	if p.More > 0 {
		s += fmt.Sprintf(", and %d ranges more", p.More)
	}
	return s
}

// Hashed is a list of states with the hashes of their ranges.
type Hashed struct {
	Tensors []Tensor
	Ranges  [][]byte
}

// Differ returns the first differing range among states that both have; nil if none differs.
func Differ(a, b Hashed) (first *Place) {
	other := map[Tensor][]byte{}
	for i, t := range b.Tensors {
		other[t] = b.Ranges[i]
	}
	for i := range a.Tensors {
		t := &a.Tensors[i]
		had, both := other[*t]
		for k := range t.Ranges() {
			if !both || bytes.Equal(a.Ranges[i][k*Size:(k+1)*Size], had[k*Size:(k+1)*Size]) {
				continue
			}
			if first == nil {
				first = &Place{Tensor: *t, From: k * RangeElems, To: min((k+1)*RangeElems, t.Elems)}
				continue
			}
			first.More++
		}
	}
	return first
}
