package run

import (
	"fmt"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// maps are those of the states that may be in 8 bits.
var maps = map[string]*vec.Q8Map{"exp_avg": vec.Q8Signed, "exp_avg_sq": vec.Q8Unsigned}

func mapOf(name string) (*vec.Q8Map, error) {
	m, ok := maps[name]
	if !ok {
		return nil, fmt.Errorf("states: %q is in 8 bits; exp_avg and exp_avg_sq alone may be", name)
	}
	return m, nil
}

// quantize writes an extent of a state in 8 bits, which begins at a block. Elements
// count from start of the parameter.
func (s *States) quantize(name string, start int64, e Extent, v []float32) error {
	m, err := mapOf(name)
	if err != nil {
		return err
	}
	if (start+e.From)%graph.QuantBlock != 0 {
		return fmt.Errorf("states: element %d of %q is no block's first; 8-bit states are written by blocks of %d", start+e.From, name, graph.QuantBlock)
	}
	x := v[e.From:e.To]
	data := make([]byte, graph.QuantLen(int64(len(x))))
	for lo := 0; lo < len(x); lo += graph.QuantBlock {
		m.Quantize(data[graph.QuantLen(int64(lo)):], x[lo:min(lo+graph.QuantBlock, len(x))])
	}
	return s.writeTo(e.Holders, e.Buf, e.Off, data)
}

// dequantize reads an extent of a state in 8 bits.
func (s *States) dequantize(h Holder, name string, start int64, e Extent, v []float32) error {
	m, err := mapOf(name)
	if err != nil {
		return err
	}
	skip := (start + e.From) % graph.QuantBlock // elements of the first block before the extent
	n := skip + e.To - e.From
	data, x := make([]byte, graph.QuantLen(n)), make([]float32, n)
	if err := h.Read(e.Buf, e.Off, data); err != nil {
		return err
	}
	for lo := int64(0); lo < n; lo += graph.QuantBlock {
		m.Dequantize(x[lo:min(lo+graph.QuantBlock, n)], data[graph.QuantLen(lo):])
	}
	copy(v[e.From:e.To], x[skip:])
	return nil
}
