package run

import (
	"fmt"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// codec quantises a block of numbers to codes and a scale, and dequantises them.
type codec interface {
	Quantize(codes []byte, x []float32) (scale float32)
	Dequantize(x []float32, codes []byte, scale float32)
}

// maps has the codec of each state that may be in 8 bits: moments, and values of frozen units.
var maps = map[string]codec{"exp_avg": vec.Q8Signed, "exp_avg_sq": vec.Q8Unsigned, valueState: vec.Int8Codes{}}

func mapOf(name string) (codec, error) {
	m, ok := maps[name]
	if !ok {
		return nil, fmt.Errorf("states: %q is in 8 bits; only %s, exp_avg and exp_avg_sq may be", name, valueState)
	}
	return m, nil
}

// scalesOf returns the buffer with the scales of a state in 8 bits.
func (s *States) scalesOf(values graph.BufID) (graph.BufID, error) {
	scales, ok := s.scales[values]
	if !ok {
		return graph.NoBuf, fmt.Errorf("states: the program has no scales of %s, which is in 8 bits", s.p.Buf(values).Name)
	}
	return scales, nil
}

// quantize writes an extent of a state in 8 bits, which must begin at a block. start is the index
// in the parameter from which e counts its elements.
func (s *States) quantize(name string, start int64, e Extent, v []float32) error {
	m, err := mapOf(name)
	if err != nil {
		return err
	}
	if (start+e.From)%graph.QuantBlock != 0 {
		return fmt.Errorf("states: element %d of %q is not the first of a block; 8-bit states are written by blocks of %d", start+e.From, name, graph.QuantBlock)
	}
	to, err := s.scalesOf(e.Buf)
	if err != nil {
		return err
	}
	x := v[e.From:e.To]
	codes, scales := make([]byte, len(x)), make([]float32, vec.Q8Blocks(len(x)))
	for lo := 0; lo < len(x); lo += graph.QuantBlock {
		hi := min(lo+graph.QuantBlock, len(x))
		scales[lo/graph.QuantBlock] = m.Quantize(codes[lo:hi], x[lo:hi])
	}
	if err := s.writeTo(e.Holders, e.Buf, e.Off, codes); err != nil {
		return err
	}
	return s.writeTo(e.Holders, to, scaleOffset(e.Off), Float32Bytes(scales))
}

// scaleOffset returns the byte offset of the scale of the code at byte offset off.
func scaleOffset(off int64) int64 { return off / graph.QuantBlock * graph.F32.Size() }

// dequantize reads an extent of a state in 8 bits.
func (s *States) dequantize(h Holder, name string, start int64, e Extent, v []float32) error {
	m, err := mapOf(name)
	if err != nil {
		return err
	}
	from, err := s.scalesOf(e.Buf)
	if err != nil {
		return err
	}
	skip := (start + e.From) % graph.QuantBlock // elements of the first block before the extent
	codes := make([]byte, e.To-e.From)
	scales := make([]float32, vec.Q8Blocks(int(skip)+len(codes)))
	if err := h.Read(e.Buf, e.Off, codes); err != nil {
		return err
	}
	if err := h.Read(from, scaleOffset(e.Off), Float32Bytes(scales)); err != nil {
		return err
	}
	x := v[e.From:e.To]
	for lo, block := 0, 0; lo < len(x); block++ {
		hi := min((block+1)*graph.QuantBlock-int(skip), len(x))
		m.Dequantize(x[lo:hi], codes[lo:hi], scales[block])
		lo = hi
	}
	return nil
}
