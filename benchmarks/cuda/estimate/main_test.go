package main

import (
	"bytes"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

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

// A row's bound is what takes longest of its bytes, its arithmetic and its launches.
func TestBoundIsTheLongest(t *testing.T) {
	wideKernel, slow := function{"a.cu", "wide"}, function{"a.cu", "slow"}
	e := &estimator{api: &paper{}, mats: &products{}, rows: map[string]*row{}, codes: map[function]sass.Code{
		wideKernel: {Total: 10, Float: 1, Load16: 1}, slow: {Total: 100, Float: 1, Load4: 1}}}
	for _, c := range []struct {
		name         string
		launched     []function
		product      []blas.Product
		flops, bytes float64
		bound        string
		seconds      float64
	}{
		{"memory", []function{wideKernel}, nil, 1, 4.3e9, "memory", 1e-3 / wide},
		{"narrow", []function{slow}, nil, 1, 4.3e9, "memory", 1e-3 / narrow},
		{"instructions", []function{slow}, nil, 67e9, 1, "instructions", 1e-3 * 100},
		{"launches", []function{wideKernel, wideKernel, wideKernel}, nil, 1, 1, "launches", 6e-6},
		{"product", nil, []blas.Product{{M: 128 * 132, N: 256, K: 1000}}, 1, 1, "arithmetic", 2 * 128 * 132 * 256 * 1000 / (67e12 * libraryF32)},
	} {
		e.api.launched, e.mats.enqueued = nil, c.product
		for _, f := range c.launched {
			e.api.launched = append(e.api.launched, launch{function: f})
		}
		require.NoError(t, e.note(c.name, c.flops, c.bytes))
		for _, r := range e.rows {
			if r.kind == c.name {
				require.Equal(t, c.bound, r.bound, c.name)
				require.InEpsilon(t, c.seconds, r.seconds, 1e-9, c.name)
			}
		}
	}
	require.Len(t, e.rows, 5)
	e.api.launched, e.mats.enqueued = []launch{{function: function{"a.cu", "unknown"}}}, nil
	require.ErrorContains(t, e.note("x", 1, 1), "no kernel unknown of a.cu")
}
