//go:build linux

package vec

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"github.com/spillway-ml/spillway/kernels/cpu/exact"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// Sizes of a GPT-2 124M step of 1,024 tokens.
const (
	benchN = 1024
	benchC = 768
	benchF = 3072
	benchV = 50257
)

type benchCase struct {
	name  string
	bytes int // read and written once each
	make  func(f func(n int) []float32) runner
}

func benchCases() []benchCase {
	const nc, nf = benchN * benchC, benchN * benchF
	return []benchCase{
		{"Add", 12 * nc, func(f func(int) []float32) runner { return &Binary[float32]{Op: Add, A: f(nc), B: f(nc), Y: f(nc)} }},
		{"AddLarge", 12 * (8 << 20), func(f func(int) []float32) runner {
			return &Binary[float32]{Op: Add, A: f(8 << 20), B: f(8 << 20), Y: f(8 << 20)}
		}},
		{"LayerNorm", 8 * nc, func(f func(int) []float32) runner {
			return &LayerNorm[float32]{N: benchN, C: benchC, X: f(nc), Gamma: f(benchC), Beta: f(benchC), Eps: 1e-5, Y: f(nc), Mean: f(benchN), Rstd: f(benchN)}
		}},
		{"LayerNormGrad", 12 * nc, func(f func(int) []float32) runner {
			return &LayerNormGrad[float32]{N: benchN, C: benchC, DY: f(nc), X: f(nc), Gamma: f(benchC), Mean: f(benchN), Rstd: f(benchN),
				DX: f(nc), DGamma: f(benchC), DBeta: f(benchC), AccumulateDX: true}
		}},
		{"RMSNorm", 8 * nc, func(f func(int) []float32) runner {
			return &RMSNorm[float32]{N: benchN, C: benchC, X: f(nc), Gamma: f(benchC), Eps: 1e-5, Y: f(nc), Rstd: f(benchN)}
		}},
		{"RMSNormGrad", 12 * nc, func(f func(int) []float32) runner {
			return &RMSNormGrad[float32]{N: benchN, C: benchC, DY: f(nc), X: f(nc), Gamma: f(benchC), Rstd: f(benchN), DX: f(nc), DGamma: f(benchC)}
		}},
		{"GELUTanh", 8 * nf, func(f func(int) []float32) runner { return &Activation[float32]{X: f(nf), Y: f(nf)} }},
		{"GELUTanhGrad", 12 * nf, func(f func(int) []float32) runner { return &ActivationGrad[float32]{X: f(nf), DY: f(nf), DX: f(nf)} }},
		{"GELUGrad", 12 * nf, func(f func(int) []float32) runner {
			return &ActivationGrad[float32]{Act: GELU, X: f(nf), DY: f(nf), DX: f(nf)}
		}},
		{"SwiGLU", 12 * nf, func(f func(int) []float32) runner { return &SwiGLU[float32]{Gate: f(nf), Up: f(nf), Y: f(nf)} }},
		{"SwiGLUGrad", 20 * nf, func(f func(int) []float32) runner {
			return &SwiGLUGrad[float32]{DY: f(nf), Gate: f(nf), Up: f(nf), DGate: f(nf), DUp: f(nf)}
		}},
		{"ColumnSum", 4 * nf, func(f func(int) []float32) runner {
			return &ColumnSum[float32]{N: benchN, C: benchF, X: f(nf), Y: f(benchF)}
		}},
		{"Softmax", 8 * nc, func(f func(int) []float32) runner { return &Softmax[float32]{N: benchN, C: benchC, X: f(nc), Y: f(nc)} }},
		{"CrossEntropy", 8 * 64 * benchV, func(f func(int) []float32) runner {
			x := f(64 * benchV)
			return &CrossEntropy[float32]{N: 64, V: benchV, Logits: x, Targets: make([]int32, 64), LSE: f(64), Loss: make([]float64, 1),
				DLogits: x, Scale: 1e-3, RowLoss: make([]float64, 64)}
		}},
		{"EmbedGrad", 12 * nc, func(f func(int) []float32) runner {
			t := make([]int32, benchN)
			for i := range t {
				t[i] = int32(i * 7919 % benchV)
			}
			return &EmbedGrad[float32]{N: benchN, V: benchV, C: benchC, Tokens: t, DY: f(nc), DTable: f(benchV * benchC), Accumulate: true}
		}},
		{"Rope", 8 * nc, func(f func(int) []float32) runner {
			return &Rope[float32]{N: benchN, Heads: 12, D: 64, Seq: 256, X: f(nc), Y: f(nc), Table: f(256 * 64)}
		}},
		{"Dropout", 8 * nc, func(f func(int) []float32) runner {
			return &Dropout[float32]{X: f(nc), Y: f(nc), Elems: 256 * benchC, P: 0.1}
		}},
		{"AdamW", 28 * (8 << 20), func(f func(int) []float32) runner {
			const n = 8 << 20
			return &AdamW{Moments: Moments{P: f(n), G: f(n), M: f(n), V: f(n), AdamStep: AdamStep{GradScale: 1, LR: 1e-6, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, BC1: 1, BC2: 1}}}
		}},
		{"AdamWBF16", 30 * (8 << 20), func(f func(int) []float32) runner {
			const n = 8 << 20
			return &AdamW{Moments: Moments{P: f(n), G: f(n), M: f(n), V: f(n), AdamStep: AdamStep{GradScale: 1, LR: 1e-6, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, BC1: 1, BC2: 1}},
				Low: make([]uint16, n), LowAs: BF16}
		}},
		{"AdamW8", 16 * (8 << 20), func(f func(int) []float32) runner {
			const n = 8 << 20
			k := &AdamW8{P: f(n), G: f(n), M: make([]byte, n), V: make([]byte, n), MScale: f(n / Q8Block), VScale: f(n / Q8Block),
				AdamStep: AdamStep{GradScale: 1, LR: 1e-6, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, BC1: 1, BC2: 1}}
			for i := range k.M {
				k.M[i], k.V[i] = byte(i), byte(i>>1)
			}
			return k
		}},
		{"SqSum", 4 * (8 << 20), func(f func(int) []float32) runner { return &SqSum{X: f(8 << 20), Acc: make([]int64, exact.Limbs)} }},
		{"SumTree2", 12 * (8 << 20), func(f func(int) []float32) runner { return sumTreeCase(f, 2) }},
		{"SumTree4", 20 * (8 << 20), func(f func(int) []float32) runner { return sumTreeCase(f, 4) }},
		{"SumTree12", 52 * (4 << 20), func(f func(int) []float32) runner { return sumTreeCase(func(int) []float32 { return f(4 << 20) }, 12) }},
		{"NarrowBF16", 6 * nf, func(f func(int) []float32) runner { return &Narrow{To: BF16, Src: f(nf), Dst: make([]uint16, nf)} }},
	}
}

func sumTreeCase(f func(int) []float32, r int) runner {
	k := &SumTree{}
	for range r {
		k.Srcs = append(k.Srcs, f(8<<20))
	}
	k.Dst = make([]float32, len(k.Srcs[0]))
	return k
}

func BenchmarkKernels(b *testing.B) {
	for _, threads := range []int{1, 2} {
		if threads > runtime.NumCPU() {
			continue
		}
		p := pool.New(threads)
		defer p.Close()
		for _, c := range benchCases() {
			b.Run(fmt.Sprintf("%s/threads=%d", c.name, threads), func(b *testing.B) {
				r := rand.New(rand.NewPCG(1, 2))
				k := c.make(func(n int) []float32 {
					x := make([]float32, n)
					for i := range x {
						x[i] = r.Float32() + 0.01
					}
					return x
				})
				b.ReportAllocs()
				b.SetBytes(int64(c.bytes))
				best := time.Duration(math.MaxInt64)
				for b.Loop() {
					start := time.Now()
					if err := k.Run(p); err != nil {
						b.Fatal(err)
					}
					best = min(best, time.Since(start))
				}
				// The machine may be shared, so the fastest call best shows the kernel's speed.
				b.ReportMetric(float64(c.bytes)/float64(best.Nanoseconds()), "best-GB/s")
			})
		}
	}
}
