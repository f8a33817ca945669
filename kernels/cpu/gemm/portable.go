package gemm

import (
	"encoding/binary"
	"math"
	"unsafe"

	"github.com/spillway-ml/spillway/kernels/cpu/num"
)

// Reference computes the product that s describes by the definition in the
// package's documentation, one element at a time: the oracle of the kernels,
// and the product of float64 gradient checks. c is (M,N); bias (N) may be nil;
// e may be nil.
func Reference[T num.Float](s Spec, a, b, c, bias []T, e Epilogue) error {
	if err := s.Validate(); err != nil {
		return err
	}
	mem := s.stored()
	for i, v := range [3][]T{a, b, c} {
		if err := mem[i].holds(len(v)); err != nil {
			return err
		}
	}
	if err := s.holdsBias(bias != nil, len(bias)); err != nil {
		return err
	}
	ar, ak := mem[0].ld, 1
	if s.TransA {
		ar, ak = 1, mem[0].ld
	}
	bk, bc := mem[1].ld, 1
	if s.TransB {
		bk, bc = 1, mem[1].ld
	}
	for i := range s.M {
		for j := range s.N {
			p := &c[i*mem[2].ld+j]
			sum := *p
			if !s.Accumulate {
				sum = 0
			}
			for k0 := 0; k0 < s.K; k0 += KC {
				var block T
				for k := k0; k < min(k0+KC, s.K); k++ {
					block = num.Fma(a[i*ar+k*ak], b[k*bk+j*bc], block)
				}
				if k0 == 0 && !s.Accumulate {
					sum = block // also a block of −0
				} else {
					sum += block
				}
			}
			if bias != nil {
				sum += bias[j]
			}
			*p = sum
		}
	}
	if e != nil && s.M > 0 && s.N > 0 {
		e.Tile(0, s.M, 0, s.N)
	}
	return nil
}

// ReferenceBytes is Reference for matrices of any type, given as their memory:
// floats are widened, summed as Reference does, and rounded once; bytes are
// summed in int32, which wraps around.
func ReferenceBytes(s Spec, a, b, c []byte, bias []float32) error {
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

// decode returns the values of a matrix's elements; U8S8 is A's uint8.
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

func f32at(p unsafe.Pointer, bytes int) *float32 { return (*float32)(unsafe.Add(p, bytes)) }

// microPortable computes 8 columns of 1 or 2 rows of each sliver of A.
func microPortable(t *tile, rows int) {
	for s := range t.n {
		for r := range rows {
			var acc [8]float32
			a := unsafe.Add(t.a, s*t.step+4*r)
			for k := range t.k {
				x := *f32at(a, 8*k)
				row := (*[8]float32)(unsafe.Add(t.b, k*t.ldb))
				for j, y := range row {
					// num.Fma32's short way, inlined.
					sum := float64(x)*float64(y) + float64(acc[j])
					if math.Float64bits(sum)&0x0fffffff != 0 {
						acc[j] = float32(sum)
					} else {
						acc[j] = num.Fma32(x, y, acc[j])
					}
				}
			}
			c := unsafe.Add(t.c, (s*rows+r)*t.ldc)
			for j := range acc {
				if t.mask>>j&1 == 0 {
					break
				}
				if t.add != 0 {
					acc[j] = *f32at(c, 4*j) + acc[j]
				}
				if t.bias != nil {
					acc[j] += *f32at(t.bias, 4*j)
				}
				*f32at(c, 4*j) = acc[j]
			}
		}
	}
}

// pairsPortable is microPortable for units of two int16.
func pairsPortable(t *tile, rows int) {
	for s := range t.n {
		for r := range rows {
			var acc [8]int32
			a := unsafe.Add(t.a, s*t.step+4*r)
			for k := range t.k {
				x := *(*[2]int16)(unsafe.Add(a, 8*k))
				row := (*[8][2]int16)(unsafe.Add(t.b, k*t.ldb))
				for j, y := range row {
					acc[j] += int32(x[0])*int32(y[0]) + int32(x[1])*int32(y[1])
				}
			}
			c := unsafe.Add(t.c, (s*rows+r)*t.ldc)
			for j := range acc {
				if t.mask>>j&1 == 0 {
					break
				}
				p := (*int32)(unsafe.Add(c, 4*j))
				if t.add != 0 {
					acc[j] += *p
				}
				*p = acc[j]
			}
		}
	}
}

func transposePortable(dst, src unsafe.Pointer, ds, ss, rows, depth, mask int) {
	for l := 0; mask>>l&1 != 0; l++ {
		from := unsafe.Add(src, min(l, rows-1)*ss)
		for k := range depth {
			*f32at(dst, k*ds+4*l) = *f32at(from, 4*k)
		}
	}
}

func copyPortable(dst, src unsafe.Pointer, ds, ss, depth, load, store int) {
	for k := range depth {
		for l := 0; store>>l&1 != 0; l++ {
			var x float32
			if load>>l&1 != 0 {
				x = *f32at(src, k*ss+4*l)
			}
			*f32at(dst, k*ds+4*l) = x
		}
	}
}
