package gemm

import (
	"encoding/binary"
	"math"
)

// referenceBytes is Reference for matrices of any type, given as bytes. Floats are widened, summed
// as Reference does, and rounded once. Integers are summed in int32, which wraps around.
func referenceBytes(s Spec, a, b, c []byte, bias []float32) error {
	if err := s.Validate(); err != nil {
		return err
	}
	mem := s.stored()
	for i, v := range [3][]byte{a, b, c} {
		size := s.In.size()
		if i == 2 {
			size = s.Out.size()
		}
		if err := mem[i].holds(len(v) / size); err != nil {
			return err
		}
	}
	if err := s.holdsBias(bias != nil, len(bias)); err != nil {
		return err
	}
	inB := s.In
	if inB == U8S8 {
		inB = S8
	}
	if s.In.integer() {
		referenceInt(s, decode(s.In, a), decode(inB, b), c)
		return nil
	}
	sums := float32s(decode(s.Out, c))
	wide := s
	wide.In, wide.Out = F32, F32
	if err := Reference(wide, float32s(decode(s.In, a)), float32s(decode(inB, b)), sums, bias, nil); err != nil {
		return err
	}
	for i := range s.M {
		for e := i * mem[2].ld; e < i*mem[2].ld+s.N; e++ {
			if s.Out == F32 {
				binary.NativeEndian.PutUint32(c[4*e:], math.Float32bits(sums[e]))
			} else {
				binary.NativeEndian.PutUint16(c[2*e:], narrowed(s.Out, sums[e]))
			}
		}
	}
	return nil
}

func referenceInt(s Spec, a, b []float64, c []byte) {
	mem := s.stored()
	for i := range s.M {
		for j := range s.N {
			var sum int32
			for k := range s.K {
				ai, bi := i*mem[0].ld+k, k*mem[1].ld+j
				if s.TransA {
					ai = k*mem[0].ld + i
				}
				if s.TransB {
					bi = j*mem[1].ld + k
				}
				sum += int32(a[ai]) * int32(b[bi])
			}
			to := c[4*(i*mem[2].ld+j):]
			if s.Accumulate {
				sum += int32(binary.NativeEndian.Uint32(to))
			}
			binary.NativeEndian.PutUint32(to, uint32(sum))
		}
	}
}

// decode returns a matrix's elements as float64; for U8S8, those of A, which are uint8.
func decode(t Type, v []byte) []float64 {
	x := make([]float64, len(v)/t.size())
	for i := range x {
		e := v[i*t.size():]
		switch t {
		case F32:
			x[i] = float64(math.Float32frombits(binary.NativeEndian.Uint32(e)))
		case BF16, F16:
			x[i] = float64(widened(t, binary.NativeEndian.Uint16(e)))
		case S8:
			x[i] = float64(int8(e[0]))
		case U8S8:
			x[i] = float64(e[0])
		}
	}
	return x
}

func float32s(x []float64) []float32 {
	v := make([]float32, len(x))
	for i := range x {
		v[i] = float32(x[i])
	}
	return v
}
