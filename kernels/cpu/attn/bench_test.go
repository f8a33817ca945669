package attn

import (
	"math/rand/v2"
	"testing"

	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// gpt2 is the attention of a GPT-2 124M layer at 4 × 1024 tokens.
var gpt2 = Shape{B: 4, Tq: 1024, Tk: 1024, H: 12, KV: 12, D: 64, Causal: true}

// causalFlop counts the visible half of the products: 2 forward, 5 backward.
func (s Shape) causalFlop(products int) float64 {
	return float64(products) * 2 * float64(s.D) * float64(s.B*s.H) * float64(s.Tq) * float64(s.Tq+1) / 2
}

func benchmark(b *testing.B, forward, backward bool) {
	pl := pool.New(2)
	defer pl.Close()
	p := newProblem[float32](rand.New(rand.NewPCG(1, 1)), gpt2, true)
	f, g := p.forward(), p.backward()
	p.run(b, pl)
	b.ReportAllocs()
	products := 0
	if forward {
		products += 2
	}
	if backward {
		products += 5
	}
	b.ResetTimer()
	for b.Loop() {
		if forward {
			_ = f.Run(pl)
		}
		if backward {
			_ = g.Run(pl)
		}
	}
	b.ReportMetric(gpt2.causalFlop(products)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
}

func BenchmarkAttentionForward(b *testing.B)         { benchmark(b, true, false) }
func BenchmarkAttentionBackward(b *testing.B)        { benchmark(b, false, true) }
func BenchmarkAttentionForwardBackward(b *testing.B) { benchmark(b, true, true) }
