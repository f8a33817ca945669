package attn

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/alloctest"
	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// everyLevel runs fn at the portable level and at each SIMD level of this CPU.
func everyLevel(t *testing.T, fn func(t *testing.T, pl *pool.Pool)) {
	pl := pool.New(2)
	defer pl.Close()
	for l := level.Portable; l <= level.Best(); l++ {
		t.Run(l.String(), func(t *testing.T) { atLevel(l, func() { fn(t, pl) }) })
	}
}

// Row t of a sequence depends only on positions up to t: a shorter sequence gives the same rows.
func TestPrefix(t *testing.T) {
	everyLevel(t, func(t *testing.T, pl *pool.Pool) {
		for _, d := range []int{12, 64} {
			s := Shape{B: 1, Tq: 150, Tk: 150, H: 4, KV: 2, D: d, Causal: true}
			long := newProblem[float32](rand.New(rand.NewPCG(3, 1)), s, true)
			require.NoError(t, long.forward().Run(pl))
			for _, n := range []int{1, 2, 63, 64, 65, 101, 149} {
				short := *long
				short.Tq, short.Tk = n, n
				short.q = append([]float32{}, long.q[:n*long.ldq]...)
				short.k, short.v = short.q[4*d:], short.q[6*d:]
				short.y, short.lse = nan[float32](n*4*d), nan[float32](4*n)
				short.workF = nan[float32](ForwardWorkspace(short.Shape))
				require.NoError(t, short.forward().Run(pl))
				requireBits(t, long.y[:n*4*d], short.y, fmt.Sprint("y, D ", d, ", first ", n))
				for h := range 4 {
					requireBits(t, long.lse[h*150:h*150+n], short.lse[h*n:(h+1)*n], "lse")
				}
			}
		}
	})
}

// Decoding the last queries over a cache of larger capacity gives the bits of prefill.
func TestDecodeEqualsPrefill(t *testing.T) {
	everyLevel(t, func(t *testing.T, pl *pool.Pool) {
		const n, capacity, h, kv = 140, 160, 6, 2
		for _, d := range []int{8, 20, 64} {
			window := map[int]int{20: 70, 64: 5}[d]
			s := Shape{B: 2, Tq: n, Tk: n, H: h, KV: kv, D: d, Causal: true, Window: window}
			all := newProblem[float32](rand.New(rand.NewPCG(4, uint64(d))), s, false)
			require.NoError(t, all.forward().Run(pl))
			cacheK, cacheV := nan[float32](2*capacity*kv*d), nan[float32](2*capacity*kv*d)
			for b := range 2 {
				copy(cacheK[b*capacity*kv*d:], all.k[b*n*kv*d:(b+1)*n*kv*d])
				copy(cacheV[b*capacity*kv*d:], all.v[b*n*kv*d:(b+1)*n*kv*d])
			}
			for _, c := range []struct{ tk, tq int }{{1, 1}, {2, 1}, {64, 1}, {65, 1}, {66, 3}, {100, 37}, {140, 1}, {130, 70}, {140, 140}} {
				one := Shape{B: 2, Tq: c.tq, Tk: c.tk, H: h, KV: kv, D: d, Causal: true, Window: window}
				var q, want []float32
				for b := range 2 {
					from, to := (b*n+c.tk-c.tq)*h*d, (b*n+c.tk)*h*d
					q, want = append(q, all.q[from:to]...), append(want, all.y[from:to]...)
				}
				f := &Forward[float32]{Shape: one, Q: q, K: cacheK, V: cacheV, Y: nan[float32](len(q)), KVRows: capacity,
					Work: nan[float32](ForwardWorkspace(one))}
				require.NoError(t, f.Run(pl))
				requireBits(t, want, f.Y, fmt.Sprintf("D %d, %d queries of %d keys", d, c.tq, c.tk))
			}
		}
	})
}

// Heads and sequences are independent: a group of heads alone gives the same bits, and for y and dq
// a single head too.
func TestBatchAndHeadsAreIndependent(t *testing.T) {
	everyLevel(t, func(t *testing.T, pl *pool.Pool) {
		const n, d = 70, 24
		s := Shape{B: 2, Tq: n, Tk: n, H: 4, KV: 2, D: d, Causal: true}
		all := newProblem[float32](rand.New(rand.NewPCG(5, 1)), s, false)
		all.run(t, pl)
		columns := func(x []float32, b, h, heads, of int) (out []float32) {
			for r := range n {
				at := ((b*n+r)*of + h) * d
				out = append(out, x[at:at+heads*d]...)
			}
			return
		}
		for b := range 2 {
			for _, heads := range []int{1, 2} {
				one := newProblem[float32](rand.New(rand.NewPCG(5, 2)), Shape{B: 1, Tq: n, Tk: n, H: heads, KV: 1, D: d, Causal: true}, false)
				for h := 0; h < 4; h += heads {
					one.q, one.dy = columns(all.q, b, h, heads, 4), columns(all.dy, b, h, heads, 4)
					one.k, one.v = columns(all.k, b, h/2, 1, 2), columns(all.v, b, h/2, 1, 2)
					one.run(t, pl)
					requireBits(t, columns(all.y, b, h, heads, 4), one.y, "y")
					requireBits(t, columns(all.dq, b, h, heads, 4), one.dq, "dq")
					if heads == 2 {
						requireBits(t, columns(all.dk, b, h/2, 1, 2), one.dk, "dk")
						requireBits(t, columns(all.dv, b, h/2, 1, 2), one.dv, "dv")
					}
				}
			}
		}
	})
}

// A NaN or Inf reaches exactly the rows that can see it.
func TestNonFinitePropagates(t *testing.T) {
	inf := float32(math.Inf(1))
	everyLevel(t, func(t *testing.T, pl *pool.Pool) {
		s := Shape{B: 1, Tq: 90, Tk: 90, H: 1, KV: 1, D: 20, Causal: true}
		for _, bad := range []float32{float32(math.NaN()), inf, -inf} {
			for _, at := range []int{0, 1, 7, 63, 64, 70, 89} {
				clean := newProblem[float32](rand.New(rand.NewPCG(6, 1)), s, false)
				clean.run(t, pl)
				dirty := newProblem[float32](rand.New(rand.NewPCG(6, 1)), s, false)
				dirty.v[at*20+3] = bad
				dirty.run(t, pl)
				for r := range 90 {
					for d := range 20 {
						got := float64(dirty.y[r*20+d])
						if r >= at && d == 3 {
							require.True(t, math.IsNaN(got) || math.IsInf(got, 0), "y[%d][%d] = %v with %v in v[%d]", r, d, got, bad, at)
						} else {
							require.Equal(t, clean.y[r*20+d], dirty.y[r*20+d])
						}
					}
					nonFinite := false
					for d := range 20 {
						nonFinite = nonFinite || dirty.dq[r*20+d]-dirty.dq[r*20+d] != 0
					}
					require.Equal(t, r >= at, nonFinite, "dq[%d] with %v in v[%d]", r, bad, at)
				}

				dirty = newProblem[float32](rand.New(rand.NewPCG(6, 1)), s, false)
				dirty.k[at*20+3] = bad
				if bad == bad { // the key's scores are +Inf, so there is no softmax
					for r := range 90 {
						dirty.q[r*20+3] = bad
					}
				}
				require.NoError(t, dirty.forward().Run(pl))
				for r := at; r < 90; r++ {
					require.True(t, dirty.y[r*20] != dirty.y[r*20], "y[%d] = %v with %v in k[%d]", r, dirty.y[r*20], bad, at)
				}
			}
		}
		// A key whose score is -Inf for every row contributes nothing. Rows that see no other key
		// are NaN.
		p := newProblem[float32](rand.New(rand.NewPCG(6, 2)), s, false)
		for r := range 90 {
			p.q[r*20] = 1
		}
		for j := range 70 {
			p.k[j*20] = -inf
		}
		require.NoError(t, p.forward().Run(pl))
		for r := range 90 {
			require.Equal(t, r < 70, p.y[r*20] != p.y[r*20], "y[%d] = %v", r, p.y[r*20])
		}
	})
}

// SIMD kernels give the portable code's bits for values that are not finite, tiny or huge too.
func TestLevelsAgreeOnWildValues(t *testing.T) {
	pl := pool.New(1)
	defer pl.Close()
	wild := []float32{0, float32(math.Copysign(0, -1)), 1e-38, -1e-42, 1e30, -1e30, 3e38, float32(math.Inf(1)), float32(math.Inf(-1)), float32(math.NaN())}
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(7, seed))
		s := Shape{B: 1, Tq: 1 + r.IntN(150), H: 2, KV: 1 + r.IntN(2), D: 1 + r.IntN(70), Causal: r.IntN(3) > 0}
		s.Tk = s.Tq + r.IntN(70)
		scatter := func(p *problem[float32]) *problem[float32] {
			r := rand.New(rand.NewPCG(8, seed))
			for _, x := range [][]float32{p.q, p.k, p.v, p.dy} {
				for range r.IntN(6) {
					x[r.IntN(len(x))] = wild[r.IntN(len(wild))]
				}
				// Scores of some heads are far below the range of exp.
				if r.IntN(2) == 0 {
					for i := range x {
						x[i] *= 8
					}
				}
			}
			return p
		}
		want := scatter(newProblem[float32](rand.New(rand.NewPCG(9, seed)), s, false))
		atLevel(level.Portable, func() { want.run(t, pl) })
		for _, l := range simdLevels(t) {
			got := scatter(newProblem[float32](rand.New(rand.NewPCG(9, seed)), s, false))
			atLevel(l, func() { got.run(t, pl) })
			requireSame(t, want.result(), got.result(), fmt.Sprint("seed ", seed, " ", s, " ", l))
		}
	}
}

// With an lse that no forward computed, all levels still agree.
func TestLevelsAgreeOnForeignLse(t *testing.T) {
	pl := pool.New(1)
	defer pl.Close()
	s := Shape{B: 1, Tq: 40, Tk: 40, H: 1, KV: 1, D: 16, Causal: true}
	run := func(l level.Level) map[string][]float32 {
		p := newProblem[float32](rand.New(rand.NewPCG(10, 1)), s, false)
		atLevel(l, func() {
			require.NoError(t, p.forward().Run(pl))
			for i := range p.lse {
				p.lse[i] += float32(i*8 - 150) // exp underflows and overflows
			}
			require.NoError(t, p.backward().Run(pl))
		})
		return p.result()
	}
	want := run(level.Portable)
	for _, l := range simdLevels(t) {
		requireSame(t, want, run(l), l.String())
	}
}

// The backward matches central differences of Σ dy·y in float64.
func TestFiniteDifferences(t *testing.T) {
	pl := pool.New(2)
	defer pl.Close()
	for i, s := range []Shape{
		{B: 2, Tq: 7, Tk: 7, H: 4, KV: 2, D: 5, Causal: true},
		{B: 1, Tq: 67, Tk: 67, H: 1, KV: 1, D: 3, Causal: true},
		{B: 1, Tq: 6, Tk: 70, H: 2, KV: 1, D: 4, Causal: false},
		{B: 1, Tq: 5, Tk: 9, H: 2, KV: 2, D: 4, Causal: true},
	} {
		t.Run(s.String(), func(t *testing.T) {
			r := rand.New(rand.NewPCG(11, uint64(i)))
			p := newProblem[float64](r, s, false)
			p.run(t, pl)
			loss := func() (sum float64) {
				require.NoError(t, p.forward().Run(pl))
				for i, y := range p.y {
					sum += y * p.dy[i]
				}
				return
			}
			for name, of := range map[string][2][]float64{"q": {p.q, p.dq}, "k": {p.k, p.dk}, "v": {p.v, p.dv}} {
				for range 25 {
					j := r.IntN(len(of[0]))
					x, h := of[0][j], 1e-5
					of[0][j] = x + h
					up := loss()
					of[0][j] = x - h
					down := loss()
					of[0][j] = x
					require.InDelta(t, (up-down)/(2*h), of[1][j], 1e-7, "d%s[%d]", name, j)
				}
			}
		})
	}
}

func TestZeroSizes(t *testing.T) {
	everyLevel(t, func(t *testing.T, pl *pool.Pool) {
		for _, s := range []Shape{
			{B: 0, Tq: 3, Tk: 3, H: 2, KV: 1, D: 4, Causal: true},
			{B: 2, Tq: 0, Tk: 0, H: 2, KV: 1, D: 4, Causal: true},
			{B: 2, Tq: 0, Tk: 70, H: 2, KV: 1, D: 4, Causal: true},
			{B: 1, Tq: 0, Tk: 5, H: 1, KV: 1, D: 16},
		} {
			p := newProblem[float32](rand.New(rand.NewPCG(12, 1)), s, false)
			p.run(t, pl)
			requireBits(t, make([]float32, s.B*s.Tk*s.KV*s.D), p.dk, "dk of no query")
			requireBits(t, make([]float32, s.B*s.Tk*s.KV*s.D), p.dv, "dv of no query")
		}
	})
}

func TestRefusals(t *testing.T) {
	pl := pool.New(1)
	defer pl.Close()
	s := Shape{B: 2, Tq: 4, Tk: 6, H: 4, KV: 2, D: 8, Causal: true}
	fresh := func() *problem[float32] { return newProblem[float32](rand.New(rand.NewPCG(13, 1)), s, false) }
	for want, change := range map[string]func(*Forward[float32]){
		"attention: B is -1 sequences, must be 0 or more":                                         func(f *Forward[float32]) { f.B = -1 },
		"attention: Tq is -2 queries, must be 0 or more":                                          func(f *Forward[float32]) { f.Tq = -2 },
		"attention: Tk is -2 keys, must be 0 or more":                                             func(f *Forward[float32]) { f.Tk = -2 },
		"attention: H is 0 heads, must be 1 or more":                                              func(f *Forward[float32]) { f.H = 0 },
		"attention: KV is 3 key/value heads, must divide the H = 4 query heads":                   func(f *Forward[float32]) { f.KV = 3 },
		"attention: D is 0 channels a head, must be 1 or more":                                    func(f *Forward[float32]) { f.D = 0 },
		"attention: Tq is 7 causal queries over Tk = 6 keys, must be Tk at most":                  func(f *Forward[float32]) { f.Tq = 7 },
		"attention: Tq is 4 queries over Tk = 0 keys, a query needs a key":                        func(f *Forward[float32]) { f.Tk = 0 },
		"attention: D of 1152921504606846976 makes more elements than can be addressed":           func(f *Forward[float32]) { f.D = 1<<60 - 16 },
		"attention: Scale is -1, must be positive and finite, or 0 for 1/√D":                      func(f *Forward[float32]) { f.Scale = -1 },
		"attention: LdQ is 31, must be at least the 32 elements of a row of q":                    func(f *Forward[float32]) { f.LdQ = 31 },
		"attention: KVRows is 5 rows, must be at least the 6 rows of a sequence of k":             func(f *Forward[float32]) { f.KVRows = 5 },
		"attention: q has 255 elements, its 2 sequences of 4 rows by 32 at stride 32 need 256":    func(f *Forward[float32]) { f.Q = f.Q[1:] },
		"attention: k has 191 elements, its 2 sequences of 6 rows by 16 at stride 16 need 192":    func(f *Forward[float32]) { f.K = f.K[1:] },
		"attention: v has 192 elements, its 2 sequences of 6 rows by 16 at stride 17 need 203":    func(f *Forward[float32]) { f.LdV = 17 },
		"attention: y has 0 elements, its 2 sequences of 4 rows by 32 at stride 32 need 256":      func(f *Forward[float32]) { f.Y = nil },
		"attention: lse has 31 elements, must have 32":                                            func(f *Forward[float32]) { f.Lse = f.Lse[1:] },
		fmt.Sprintf("attention: the workspace has 0 elements, must have %d", ForwardWorkspace(s)): func(f *Forward[float32]) { f.Work = nil },
		"attention: KVRows of 9223372036854775807 rows reaches beyond what can be addressed":      func(f *Forward[float32]) { f.KVRows = math.MaxInt },
		"attention: LdK of 9223372036854775807 reaches beyond what can be addressed":              func(f *Forward[float32]) { f.LdK = math.MaxInt },
	} {
		p := fresh()
		f := p.forward()
		change(f)
		require.EqualError(t, f.Run(pl), want)
		requireBits(t, nan[float32](len(p.y)), p.y, "y after a refusal")
	}
	for want, change := range map[string]func(*Backward[float32]){
		"attention backward: dy has 1 elements, its 2 sequences of 4 rows by 32 at stride 32 need 256": func(f *Backward[float32]) { f.Dy = f.Dy[:1] },
		"attention backward: dq has 0 elements, its 2 sequences of 4 rows by 32 at stride 32 need 256": func(f *Backward[float32]) { f.Dq = nil },
		"attention backward: dk has 0 elements, its 2 sequences of 6 rows by 16 at stride 16 need 192": func(f *Backward[float32]) { f.Dk = nil },
		"attention backward: LdDv is 8, must be at least the 16 elements of a row of dv":               func(f *Backward[float32]) { f.LdDv = 8 },
		"attention backward: lse has 0 elements, must have 32":                                         func(f *Backward[float32]) { f.Lse = nil },
		"attention: KV is 0 key/value heads, must divide the H = 4 query heads":                        func(f *Backward[float32]) { f.KV = 0 },
	} {
		p := fresh()
		f := p.backward()
		change(f)
		require.EqualError(t, f.Run(pl), want)
		requireBits(t, nan[float32](len(p.dv)), p.dv, "dv after a refusal")
	}
	require.EqualError(t, fresh().forward().Run(nil), "attention: no worker pool given")
	require.EqualError(t, fresh().backward().Run(nil), "attention: no worker pool given")
}

func TestNoAllocations(t *testing.T) {
	everyLevel(t, func(t *testing.T, pl *pool.Pool) {
		p := newProblem[float32](rand.New(rand.NewPCG(14, 1)), Shape{B: 2, Tq: 40, Tk: 40, H: 2, KV: 2, D: 16, Causal: true}, true)
		f, g := p.forward(), p.backward()
		require.Zero(t, alloctest.PerRun(20, func() {
			if f.Run(pl) != nil || g.Run(pl) != nil {
				panic("refused")
			}
		}))
	})
}

// The workspace is bounded as the sequence or the batch grows, and does not depend on how full a
// cache is.
func TestWorkspace(t *testing.T) {
	s := Shape{B: 1, Tq: 512, Tk: 512, H: 1, KV: 1, D: 64, Causal: true}
	long := s
	long.Tq, long.Tk = 1<<20, 1<<20
	many := s
	many.B = 1000
	require.Equal(t, maxSlots*ForwardWorkspace(s), ForwardWorkspace(long))
	require.Equal(t, BackwardWorkspace(s), BackwardWorkspace(long))
	require.Equal(t, maxSlots*BackwardWorkspace(s), BackwardWorkspace(many))
	for _, tq := range []int{1, 3, 64, 500} {
		a, b := s, s
		a.Tq, b.Tq = tq, tq
		a.Tk = tq + 1
		for b.Tk = tq; b.Tk < tq+130; b.Tk++ {
			require.LessOrEqual(t, ForwardWorkspace(b), ForwardWorkspace(a))
		}
	}
	require.Zero(t, ForwardWorkspace(Shape{B: 1, Tq: 1, Tk: 1, H: 3, KV: 2, D: 1}))
	require.Zero(t, BackwardWorkspace(Shape{D: -1}))
}

// The bits match fixed values, for inputs that are the same on every processor. arm64 and future
// CPUs must give them too.
func TestKnownBits(t *testing.T) {
	everyLevel(t, func(t *testing.T, pl *pool.Pool) {
		p := newProblem[float32](rand.New(rand.NewPCG(15, 1)), Shape{B: 1, Tq: 90, Tk: 90, H: 2, KV: 1, D: 20, Causal: true}, false)
		r := rand.New(rand.NewPCG(15, 2))
		for _, x := range [][]float32{p.q, p.k, p.v, p.dy} {
			for i := range x {
				x[i] = r.Float32()*4 - 2
			}
		}
		p.run(t, pl)
		got := map[string]string{}
		for name, x := range p.result() {
			sum := sha256.New()
			require.NoError(t, binary.Write(sum, binary.LittleEndian, x))
			got[name] = hex.EncodeToString(sum.Sum(nil))[:16]
		}
		require.Equal(t, knownBits, got)
	})
}

var knownBits = map[string]string{
	"y": "23dc9f3c6b370276", "lse": "44aaa8a23e93e92b",
	"dq": "b8b8534360bbf553", "dk": "2b8acf07b01dd8b1", "dv": "a07db2ef65349de6",
}
