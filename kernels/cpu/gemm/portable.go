package gemm

import (
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
