package attn

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// problem holds the operands of one attention. They are in separate buffers, or q, k, v (and their
// derivatives) are packed in rows of one buffer.
type problem[T Float] struct {
	Shape
	scale, limit  T // limit: Cap
	q, k, v, dy   []T
	ldq, ldk, ldv int // strides of q, k, v and of their derivatives
	y, lse        []T
	dq, dk, dv    []T
	workF, workB  []T
	starts        []T // nil: a sequence is one document
}

func normal[T Float](r *rand.Rand, n int) []T {
	x := make([]T, n)
	for i := range x {
		x[i] = T(r.NormFloat64())
	}
	return x
}

func nan[T Float](n int) []T {
	x := make([]T, n)
	for i := range x {
		x[i] = T(math.NaN())
	}
	return x
}

func newProblem[T Float](r *rand.Rand, s Shape, packed bool) *problem[T] {
	p := &problem[T]{Shape: s}
	wq, wk := s.H*s.D, s.KV*s.D
	if packed {
		ld := wq + 2*wk
		buf, dbuf := normal[T](r, s.B*s.Tq*ld), nan[T](s.B*s.Tq*ld)
		p.q, p.k, p.v = buf, buf[wq:], buf[wq+wk:]
		p.dq, p.dk, p.dv = dbuf, dbuf[wq:], dbuf[wq+wk:]
		p.ldq, p.ldk, p.ldv = ld, ld, ld
	} else {
		p.ldq, p.ldk, p.ldv = wq, wk, wk
		p.q, p.k, p.v = normal[T](r, s.B*s.Tq*wq), normal[T](r, s.B*s.Tk*wk), normal[T](r, s.B*s.Tk*wk)
		p.dq, p.dk, p.dv = nan[T](len(p.q)), nan[T](len(p.k)), nan[T](len(p.v))
	}
	p.dy = normal[T](r, s.B*s.Tq*wq)
	p.y, p.lse = nan[T](len(p.dy)), nan[T](s.B*s.H*s.Tq)
	// Scratch is filled with NaN, so that reading it before writing is detected.
	p.workF, p.workB = nan[T](ForwardWorkspace(s)), nan[T](BackwardWorkspace(s))
	return p
}

func (p *problem[T]) forward() *Forward[T] {
	return &Forward[T]{Shape: p.Shape, Scale: p.scale, Cap: p.limit, Q: p.q, K: p.k, V: p.v, Y: p.y, Lse: p.lse, Work: p.workF,
		LdQ: p.ldq, LdK: p.ldk, LdV: p.ldv, Starts: p.starts}
}

func (p *problem[T]) backward() *Backward[T] {
	return &Backward[T]{Shape: p.Shape, Scale: p.scale, Cap: p.limit, Q: p.q, K: p.k, V: p.v, Y: p.y, Dy: p.dy, Lse: p.lse,
		Dq: p.dq, Dk: p.dk, Dv: p.dv, Work: p.workB,
		LdQ: p.ldq, LdK: p.ldk, LdV: p.ldv, LdDq: p.ldq, LdDk: p.ldk, LdDv: p.ldv, Starts: p.starts}
}

func (p *problem[T]) run(t testing.TB, pl *pool.Pool) {
	t.Helper()
	require.NoError(t, p.forward().Run(pl))
	require.NoError(t, p.backward().Run(pl))
}

// result returns all outputs, rows without gaps.
func (p *problem[T]) result() map[string][]T {
	dense := func(x []T, rows, width, ld int) []T {
		var out []T
		for i := range rows {
			out = append(out, x[i*ld:i*ld+width]...)
		}
		return out
	}
	return map[string][]T{"y": p.y, "lse": p.lse,
		"dq": dense(p.dq, p.B*p.Tq, p.H*p.D, p.ldq),
		"dk": dense(p.dk, p.B*p.Tk, p.KV*p.D, p.ldk),
		"dv": dense(p.dv, p.B*p.Tk, p.KV*p.D, p.ldv)}
}

// naive computes softmax(scale·q·kᵀ)·v and its derivatives from complete rows of scores, in
// float64.
func naive[T Float](p *problem[T]) map[string][]float64 {
	s := p.Shape
	y, dq, lse := make([]float64, s.B*s.Tq*s.H*s.D), make([]float64, s.B*s.Tq*s.H*s.D), make([]float64, s.B*s.H*s.Tq)
	dk, dv := make([]float64, s.B*s.Tk*s.KV*s.D), make([]float64, s.B*s.Tk*s.KV*s.D)
	scale := float64(p.scale)
	if scale == 0 {
		scale = 1 / math.Sqrt(float64(s.D))
	}
	for b := range s.B {
		for h := range s.H {
			g := h / (s.H / s.KV)
			for t := range s.Tq {
				n := s.Tk
				if s.Causal {
					n = t + s.Tk - s.Tq + 1
				}
				prob, slope := make([]float64, n), make([]float64, n)
				first := 0
				if s.Window > 0 {
					first = max(0, n-s.Window)
				}
				if p.starts != nil {
					first = max(first, int(p.starts[b*s.Tq+t]))
				}
				most := math.Inf(-1)
				for j := range n {
					for d := range s.D {
						prob[j] += float64(p.q[(b*s.Tq+t)*p.ldq+h*s.D+d]) * float64(p.k[(b*s.Tk+j)*p.ldk+g*s.D+d])
					}
					prob[j] *= scale
					slope[j] = 1
					if c := float64(p.limit); c > 0 {
						u := math.Tanh(prob[j] / c)
						prob[j], slope[j] = c*u, 1-u*u
					}
					if j < first {
						prob[j] = math.Inf(-1)
					}
					most = max(most, prob[j])
				}
				sum := 0.0
				for j := range prob {
					prob[j] = math.Exp(prob[j] - most)
					sum += prob[j]
				}
				lse[(b*s.H+h)*s.Tq+t] = most + math.Log(sum)
				dp, mean := make([]float64, n), 0.0
				for j := range prob {
					prob[j] /= sum
					for d := range s.D {
						at := ((b*s.Tq+t)*s.H+h)*s.D + d
						v := float64(p.v[(b*s.Tk+j)*p.ldv+g*s.D+d])
						y[at] += prob[j] * v
						dp[j] += float64(p.dy[at]) * v
						dv[((b*s.Tk+j)*s.KV+g)*s.D+d] += prob[j] * float64(p.dy[at])
					}
					mean += prob[j] * dp[j]
				}
				for j := range prob {
					ds := prob[j] * (dp[j] - mean) * slope[j] * scale
					for d := range s.D {
						at := ((b*s.Tq+t)*s.H+h)*s.D + d
						dq[at] += ds * float64(p.k[(b*s.Tk+j)*p.ldk+g*s.D+d])
						dk[((b*s.Tk+j)*s.KV+g)*s.D+d] += ds * float64(p.q[(b*s.Tq+t)*p.ldq+h*s.D+d])
					}
				}
			}
		}
	}
	return map[string][]float64{"y": y, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
}

func requireClose[T Float](t testing.TB, want map[string][]float64, got map[string][]T, tol float64) {
	t.Helper()
	for name, w := range want {
		g := got[name]
		require.Len(t, g, len(w), name)
		big := 1e-30
		for _, x := range w {
			big = max(big, math.Abs(x))
		}
		for i := range w {
			if d := math.Abs(float64(g[i]) - w[i]); !(d <= tol*big) {
				t.Fatalf("%s[%d] = %v, want %v (largest %v)", name, i, g[i], w[i], big)
			}
		}
	}
}

func sameBits[T Float](a, b T) bool {
	return math.Float64bits(float64(a)) == math.Float64bits(float64(b)) || a != a && b != b
}

func requireBits[T Float](t testing.TB, want, got []T, msg string) {
	t.Helper()
	require.Len(t, got, len(want), msg)
	for i := range want {
		if !sameBits(want[i], got[i]) {
			t.Fatalf("%s: element %d is %v, want %v", msg, i, got[i], want[i])
		}
	}
}

func requireSame[T Float](t testing.TB, want, got map[string][]T, msg string) {
	t.Helper()
	for name, w := range want {
		requireBits(t, w, got[name], msg+" "+name)
	}
}

var shapes = []Shape{
	{B: 1, Tq: 1, Tk: 1, H: 1, KV: 1, D: 1, Causal: true},
	{B: 2, Tq: 5, Tk: 5, H: 2, KV: 1, D: 4, Causal: true},
	{B: 1, Tq: 70, Tk: 70, H: 4, KV: 2, D: 8, Causal: true},
	{B: 2, Tq: 129, Tk: 129, H: 3, KV: 3, D: 20, Causal: true},
	{B: 1, Tq: 200, Tk: 200, H: 2, KV: 1, D: 64, Causal: true},
	{B: 1, Tq: 65, Tk: 65, H: 2, KV: 2, D: 128, Causal: true},
	{B: 1, Tq: 77, Tk: 77, H: 1, KV: 1, D: 80, Causal: true},
	{B: 2, Tq: 33, Tk: 100, H: 2, KV: 2, D: 16, Causal: false},
	{B: 1, Tq: 100, Tk: 33, H: 6, KV: 2, D: 36, Causal: false},
	{B: 2, Tq: 30, Tk: 111, H: 2, KV: 1, D: 24, Causal: true},
	{B: 1, Tq: 64, Tk: 128, H: 1, KV: 1, D: 48, Causal: true},
	{B: 1, Tq: 600, Tk: 600, H: 1, KV: 1, D: 17, Causal: true},
	{B: 1, Tq: 530, Tk: 541, H: 2, KV: 1, D: 3, Causal: true},
	{B: 1, Tq: 515, Tk: 70, H: 2, KV: 1, D: 2, Causal: false},
	{B: 1, Tq: 300, Tk: 300, H: 2, KV: 1, D: 12, Causal: true, Window: 2},
	{B: 2, Tq: 200, Tk: 200, H: 2, KV: 2, D: 24, Causal: true, Window: 63},
	{B: 1, Tq: 600, Tk: 600, H: 2, KV: 1, D: 8, Causal: true, Window: 64},
	{B: 1, Tq: 650, Tk: 650, H: 1, KV: 1, D: 16, Causal: true, Window: 130},
	{B: 2, Tq: 60, Tk: 311, H: 2, KV: 1, D: 12, Causal: true, Window: 70},
}

func (s Shape) String() string {
	return fmt.Sprintf("B%d.Tq%d.Tk%d.H%d.KV%d.D%d.causal=%v.window=%d", s.B, s.Tq, s.Tk, s.H, s.KV, s.D, s.Causal, s.Window)
}

// limitOf gives every other shape a soft cap that its scores reach.
func limitOf(i int) float32 { return float32(i%2) * 1.5 }

func TestAgainstNaive(t *testing.T) {
	pl := pool.New(2)
	defer pl.Close()
	for i, s := range shapes {
		t.Run(s.String(), func(t *testing.T) {
			packed := s.Tq == s.Tk && i%2 == 0
			p := newProblem[float32](rand.New(rand.NewPCG(1, uint64(i))), s, packed)
			if i%3 == 0 {
				p.scale = 0.3
			}
			p.limit = limitOf(i)
			p.run(t, pl)
			requireClose(t, naive(p), p.result(), 3e-6)
			p64 := newProblem[float64](rand.New(rand.NewPCG(1, uint64(i))), s, packed)
			p64.limit = float64(p.limit)
			p64.run(t, pl)
			requireClose(t, naive(p64), p64.result(), 1e-13)
		})
	}
}
