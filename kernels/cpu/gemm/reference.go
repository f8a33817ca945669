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
	blocks := make([][4]T, 0, (s.K+KC-1)/KC) // of a row and four columns, which do not wait for each other
	for i := range s.M {
		for j := range s.N {
			if j%4 == 0 {
				blocks = blocks[:0]
				for k := 0; k < s.K; k += KC {
					blocks = append(blocks, blocksOf(a[i*ar+k*ak:], b[k*bk+j*bc:], ak, bk, bc, min(KC, s.K-k), s.N-j))
				}
			}
			p := &c[i*mem[2].ld+j]
			sum := *p
			if !s.Accumulate {
				sum = 0
			}
			for k, four := range blocks {
				block := four[j%4]
				if k == 0 && !s.Accumulate {
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

// blocksOf are the sums over n elements of a row with up to four columns, each one FMA after the other.
func blocksOf[T num.Float](row, columns []T, rk, ck, next, n, wide int) (sums [4]T) {
	if wide < 4 {
		for j := range wide {
			for k := range n {
				sums[j] = num.Fma(row[k*rk], columns[k*ck+j*next], sums[j])
			}
		}
		return sums
	}
	var s0, s1, s2, s3 T
	for k := range n {
		x, y := row[k*rk], columns[k*ck:]
		s0 = num.Fma(x, y[0], s0)
		s1 = num.Fma(x, y[next], s1)
		s2 = num.Fma(x, y[2*next], s2)
		s3 = num.Fma(x, y[3*next], s3)
	}
	return [4]T{s0, s1, s2, s3}
}
