// Command int8 prints the signal-to-noise ratios of what --int8 quantises, against
// fp64, over random rows with and without outliers.
package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/gemm"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// Rows of a saved activation, of so many columns, and the columns of a product.
const rows, cols, outputs = 64, 768, 256

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "int8:", err)
		os.Exit(1)
	}
}

func run() error {
	fmt.Println("| rows of | outliers a row | saved, worst row | saved, mean | product |")
	fmt.Println("| --- | --- | --- | --- | --- |")
	for _, d := range []struct {
		name string
		draw func(r *rand.Rand, i int) float64
	}{
		{"normal numbers", func(r *rand.Rand, _ int) float64 { return r.NormFloat64() }},
		{"gelu of normal numbers", func(r *rand.Rand, _ int) float64 {
			x := r.NormFloat64()
			return x * (1 + math.Erf(x/math.Sqrt2)) / 2
		}},
		{"normal, one in 256 ten times larger", func(r *rand.Rand, _ int) float64 {
			if r.IntN(256) == 0 {
				return 10 * r.NormFloat64()
			}
			return r.NormFloat64()
		}},
		{"normal, one column 50 times larger", func(r *rand.Rand, i int) float64 {
			if i%cols == 7 {
				return 50 * r.NormFloat64()
			}
			return r.NormFloat64()
		}},
	} {
		r := rand.New(rand.NewPCG(1, 1))
		x, w := make([]uint16, rows*cols), make([]uint16, cols*outputs)
		for i := range x {
			x[i] = num.BF16(float32(d.draw(r, i)))
		}
		for i := range w {
			w[i] = num.BF16(float32(r.NormFloat64() * 0.02))
		}
		worst, mean, err := saved(x)
		if err != nil {
			return err
		}
		ratio, err := product(x, w)
		if err != nil {
			return err
		}
		fmt.Printf("| %s | %.1f | %.1f dB | %.1f dB | %.1f dB |\n", d.name, outliers(x), worst, mean, ratio)
	}
	return nil
}

// outliers is how many numbers a row has, in the mean, beyond 6: six standard
// deviations of what surrounds them.
func outliers(x []uint16) float64 {
	n := 0
	for _, h := range x {
		if math.Abs(float64(num.FromBF16(h))) > 6 {
			n++
		}
	}
	return float64(n) / rows
}

func decibels(signal, noise float64) float64 { return 10 * math.Log10(signal/noise) }

// saved is the ratio of rows that rest as int8.
func saved(x []uint16) (worst, mean float64, err error) {
	q := vec.Int8{Block: cols, Len: len(x), Parts: 1}
	q.Q = make([]byte, graph.QuantAttr{Block: cols, Parts: 1}.Bytes(int64(len(x))))
	k, err := vec.NewQuantize8(q, nil, vec.Half16{X: x, As: vec.BF16}, nil)
	if err != nil {
		return 0, 0, err
	}
	y := make([]uint16, len(x))
	for _, step := range []vec.Kernel{k, &vec.Dequantize8{From: q, Y16: y, As: vec.BF16}} {
		if err := step.Run(nil); err != nil {
			return 0, 0, err
		}
	}
	worst = math.Inf(1)
	for r := range rows {
		var signal, noise float64
		for i := r * cols; i < (r+1)*cols; i++ {
			v, w := float64(num.FromBF16(x[i])), float64(num.FromBF16(y[i]))
			signal, noise = signal+v*v, noise+(v-w)*(v-w)
		}
		worst, mean = min(worst, decibels(signal, noise)), mean+decibels(signal, noise)/rows
	}
	return worst, mean, nil
}

// product is the ratio of x·w by int8.
func product(x, w []uint16) (float64, error) {
	left := &vec.Int8Matrix{X: x, As: vec.BF16, Rows: rows, Cols: cols, Codes: make([]byte, len(x)), Scales: make([]float32, rows)}
	right := &vec.Int8Matrix{X: w, As: vec.BF16, Rows: cols, Cols: outputs, ByColumn: true, Codes: make([]byte, len(w)), Scales: make([]float32, outputs)}
	for _, m := range []*vec.Int8Matrix{left, right} {
		if err := m.Run(nil); err != nil {
			return 0, err
		}
	}
	s := gemm.Forward(rows, cols, outputs, false)
	s.In, s.Out = gemm.S8, gemm.BF16
	k, err := gemm.New(s)
	if err != nil {
		return 0, err
	}
	pl := pool.New(1)
	defer pl.Close()
	y := make([]uint16, rows*outputs)
	if err := k.RunScaled(pl, left.Codes, right.Codes, left.Scales, right.Scales, gemm.Bytes(y), nil, make([]byte, gemm.Workspace(s))); err != nil {
		return 0, err
	}
	var signal, noise float64
	for i := range y {
		sum := 0.0
		for j := range cols {
			sum += float64(num.FromBF16(x[i/outputs*cols+j])) * float64(num.FromBF16(w[j*outputs+i%outputs]))
		}
		d := float64(num.FromBF16(y[i])) - sum
		signal, noise = signal+sum*sum, noise+d*d
	}
	return decibels(signal, noise), nil
}
