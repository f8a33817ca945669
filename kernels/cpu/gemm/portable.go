package gemm

import (
	"math"
	"unsafe"

	"github.com/spillway-ml/spillway/kernels/cpu/num"
)

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
