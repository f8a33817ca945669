package attn

import (
	"math/rand/v2"
	"testing"

	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// gpt2 is the shape of a GPT-2 124M layer's attention at 4 × 1024 tokens.
var gpt2 = Shape{B: 4, Tq: 1024, Tk: 1024, H: 12, KV: 12, D: 64, Causal: true}

// causalFlop counts the visible half of the products: 2 forward, 5 backward.
func (s Shape) causalFlop(products int) float64 {
	return float64(products) * 2 * float64(s.D) * float64(s.B*s.H) * float64(s.Tq) * float64(s.Tq+1) / 2
}

// llama is the shape of a Llama-3-8B layer's attention at 512 tokens.
var llama = Shape{B: 1, Tq: 512, Tk: 512, H: 32, KV: 8, D: 128, Causal: true}

func benchmark(b *testing.B, s Shape, forward, backward bool) {
	pl := pool.New(2)
	defer pl.Close()
	p := newProblem[float32](rand.New(rand.NewPCG(1, 1)), s, true)
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
	b.ReportMetric(s.causalFlop(products)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
}

func BenchmarkAttentionForward(b *testing.B)         { benchmark(b, gpt2, true, false) }
func BenchmarkAttentionBackward(b *testing.B)        { benchmark(b, gpt2, false, true) }
func BenchmarkAttentionForwardBackward(b *testing.B) { benchmark(b, gpt2, true, true) }
func BenchmarkAttentionGrouped(b *testing.B)         { benchmark(b, llama, true, true) }

// One new token per sequence over a cache of 1024; the bytes counted are the cache's.
func BenchmarkAttentionDecode(b *testing.B) {
	pl := pool.New(2)
	defer pl.Close()
	s := gpt2
	s.Tq = 1
	p := newProblem[float32](rand.New(rand.NewPCG(1, 1)), s, false)
	f := p.forward()
	b.ReportAllocs()
	b.SetBytes(int64(8 * len(p.k)))
	for b.Loop() {
		if err := f.Run(pl); err != nil {
			b.Fatal(err)
		}
	}
}
