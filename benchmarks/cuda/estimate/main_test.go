package main

import (
	"bytes"
	"encoding/binary"
	"math"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/sass"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
)

// The page is what the command prints.
func TestPageIsTheEstimate(t *testing.T) {
	var got bytes.Buffer
	require.NoError(t, run(&got))
	page, err := os.ReadFile("README.md")
	require.NoError(t, err)
	require.Equal(t, string(page), got.String(), "go run ./benchmarks/cuda/estimate > benchmarks/cuda/estimate/README.md")
}

// params packs parameters of 8 bytes behind the predicate's.
func params(list ...int64) []byte {
	b := make([]byte, 8)
	for _, v := range list {
		b = binary.LittleEndian.AppendUint64(b, uint64(v))
	}
	return b
}

// Launches of an operation run one after the other: each takes its bytes or its instructions,
// a product what follows from the table, and all what a launch takes.
func TestEachLaunchCounts(t *testing.T) {
	rates, err := readRates()
	require.NoError(t, err)
	sums, many := function{"a.cu", "loss_sum"}, function{"b.cu", "loss_sum"}
	e := &estimator{api: &paper{}, mats: &products{}, rates: rates, rows: map[string]*row{}, made: map[blas.Product]int{},
		codes: map[function]sass.Code{sums: {Total: 10, Float: 1}, many: {Total: 100, Float: 50}}}
	losses := func(f function, n int64) launch { return launch{f, driver.Dim{X: 1}, params(0, n, 0), 0} }
	gap, memory := rates.of["launch"], rates.of["memory"]
	product := blas.Product{M: 1280, N: 50257, K: 768, A: blas.Matrix{Type: graph.BF16}, B: blas.Matrix{Type: graph.BF16}, C: blas.Matrix{Type: graph.F32}}
	for _, c := range []struct {
		name     string
		launched []launch
		product  []blas.Product
		flops    float64
		bound    string
		seconds  float64
	}{
		{"memory", []launch{losses(sums, 1e9)}, nil, 1, "memory", 8e9/memory + gap},
		{"two", []launch{losses(sums, 1e9), losses(sums, 1e9)}, nil, 1, "memory", 16e9/memory + 2*gap},
		{"instructions", []launch{losses(many, 1)}, nil, 67e9, "instructions", 1e-3*100/50 + gap},
		{"launches", []launch{losses(sums, 1), losses(sums, 1)}, nil, 1, "launches", 2*8/memory + 2*gap},
		{"after", []launch{losses(sums, 1e9)}, []blas.Product{product}, 2 * 1280 * 50257 * 768, "memory", 8e9/memory + rates.product(product) + 2*gap},
	} {
		e.api.launched, e.mats.enqueued = c.launched, c.product
		require.NoError(t, e.note(c.name, c.flops))
		for _, r := range e.rows {
			if r.kind == c.name {
				require.Equal(t, c.bound, r.bound(), c.name)
				require.InEpsilon(t, c.seconds, r.seconds, 1e-6, c.name)
			}
		}
	}
	require.Len(t, e.rows, 5)
	e.api.launched, e.mats.enqueued = []launch{{function: function{"a.cu", "unknown"}}}, nil
	require.ErrorContains(t, e.note("x", 1), "no kernel unknown of a.cu")
	e.codes[function{"a.cu", "unknown"}] = sass.Code{Total: 1}
	require.ErrorContains(t, e.note("x", 1), "how many bytes kernel unknown of a.cu moves")
}

// The fit finds what a table was made from, and is near the products that others timed.
func TestProductsFollowTheTable(t *testing.T) {
	r, err := readRates()
	require.NoError(t, err)
	for _, p := range r.products {
		require.InEpsilon(t, p.seconds, p.expected, 0.2, "%+v", p)
	}
	require.Equal(t, 0.5*132/132, r.waves(16, 1, 128, 256*66), "K is split over idle multiprocessors")
	require.Equal(t, 2.0, r.waves(16, 1, 128*133, 256))
	made := &rates{of: r.of, fits: map[int][3]float64{}}
	for i, n := range []int64{512, 2048, 4096, 9000} {
		w := made.waves(16, 1, n, n)
		made.products = append(made.products, timed{bits: 16, batch: 1, m: n, n: n, k: 512 << i, seconds: 3e-6 + w*(2e-6+float64(int64(512)<<i)*1e-8)})
	}
	f, err := made.fit(16)
	require.NoError(t, err)
	for i, want := range []float64{3e-6, 2e-6, 1e-8} {
		require.InEpsilon(t, want, f[i], 1e-6)
	}
	_, err = made.fit(32)
	require.ErrorContains(t, err, "too few rows of 32 bits")
	_, err = lines("a\tb\n", 3)
	require.ErrorContains(t, err, "the last a source")
	require.False(t, math.IsNaN(r.product(blas.Product{M: 1, N: 1, K: 1})))
}
