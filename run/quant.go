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

// maps gives the codec of each state that may be in 8 bits: moments, and values of frozen units.
var maps = map[string]codec{"exp_avg": vec.Q8Signed, "exp_avg_sq": vec.Q8Unsigned, valueState: vec.Int8Codes{}}

func mapOf(name string) (codec, error) {
	m, ok := maps[name]
	if !ok {
		return nil, fmt.Errorf("states: %q is in 8 bits; only %s, exp_avg and exp_avg_sq may be", name, valueState)
	}
	return m, nil
}

// scaleOffset returns the byte offset of the scale of the code at byte offset off.
func scaleOffset(off int64) int64 { return off / graph.QuantBlock * graph.F32.Size() }
