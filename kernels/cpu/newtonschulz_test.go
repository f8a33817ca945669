package cpu

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	devcpu "github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/optest"
	"github.com/spillway-ml/spillway/kernels/cpu/gemm"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// BenchmarkNewtonSchulz compares the operation with its matrix products alone, for GPT-2 124M's
// matrices. The limit is the time of the operations at the rate of complete products of the same
// shapes, measured alternately. Times are medians.
func BenchmarkNewtonSchulz(b *testing.B) {
	for _, threads := range []int{1, 2} {
		for _, s := range [][2]int{{768, 2304}, {768, 768}, {768, 3072}, {3072, 768}} {
			name := fmt.Sprintf("%dx%d/threads=%d", s[0], s[1], threads)
			b.Run(name, func(b *testing.B) { newtonSchulzLimit(b, s[0], s[1], threads) })
		}
	}
}

func newtonSchulzLimit(b *testing.B, rows, cols, threads int) {
	rng := rand.New(rand.NewPCG(1, 1))
	shape := [][]int64{{int64(rows), int64(cols)}}
	attr := graph.NewtonSchulzAttr{Axis: -1, Ranks: 1, Factor: 0.5}
	o := &operation{Operation: optest.Of(graph.NewtonSchulz, attr, shape, shape, 0, rng, optionsOf(graph.F32))}
	ctx := devcpu.New(0, devcpu.Options{})
	defer func() { require.NoError(b, ctx.Close()) }()
	pl := pool.New(threads)
	defer pl.Close()
	k := o.bind(b, ctx, pl)
	var alone []func()
	gram, square, apply := newtonSchulzSpecs(rows, cols)
	part := float64(gram.M+1) / float64(2*gram.M) // part computed of a symmetric product
	for _, s := range []gemm.Spec{gram, square, apply} {
		s.Symmetric = false
		p, err := gemm.New(s)
		require.NoError(b, err)
		random := func(n int) []float32 {
			v := make([]float32, n)
			for i := range v {
				v[i] = rng.Float32()
			}
			return v
		}
		x, y, z, work := random(s.M*s.K), random(s.K*s.N), make([]float32, s.M*s.N), make([]byte, gemm.Workspace(s))
		alone = append(alone, func() { require.NoError(b, p.Run(pl, x, y, z, nil, work)) })
	}
	times := make([][]float64, 4)
	timed := func(i int, f func()) {
		t := time.Now()
		f()
		times[i] = append(times[i], time.Since(t).Seconds())
	}
	for b.Loop() {
		timed(0, func() { require.NoError(b, launch(b, ctx, k)) })
		for i, f := range alone {
			for range 2 {
				timed(1+i, f)
			}
		}
	}
	for _, t := range times {
		slices.Sort(t)
	}
	median := func(i int) float64 { return times[i][len(times[i])/2] }
	limit := graph.NewtonSchulzSteps * ((median(1)+median(2))*part + median(3))
	b.ReportMetric(1e3*median(0), "op-ms")
	b.ReportMetric(1e3*limit, "limit-ms")
	b.ReportMetric(limit/median(0), "of-limit")
}
