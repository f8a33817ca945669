package gemm

import "github.com/spillway-ml/spillway/kernels/cpu/num"

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
