package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spillway-ml/spillway/graph"
)

func run(w io.Writer) error {
	rates, err := readRates()
	if err != nil {
		return err
	}
	codes, err := recorded("sm_90")
	if err != nil {
		return err
	}
	var steps []*estimator
	var totals []float64
	for _, c := range cases {
		p, err := build(c.layers, c.heads, c.width, c.vocab, c.positions, c.rows, c.precision)
		if err != nil {
			return err
		}
		e, err := step(p, codes, rates)
		if err != nil {
			return err
		}
		steps, totals = append(steps, e), append(totals, e.seconds())
	}
	preamble(w, rates)
	compare(w, steps, totals)
	for i, c := range cases {
		steps[i].write(w, c.name, c.rows*c.positions)
	}
	return nil
}

func (e *estimator) seconds() (total float64) {
	for _, r := range e.rows {
		total += r.seconds
	}
	return total
}

func preamble(w io.Writer, r *rates) {
	fmt.Fprint(w, `# What a step would take on a GPU: an estimate

Nothing here was measured; [what an H200 took](../README.md) was, later. This is the output of

    go run ./benchmarks/cuda/estimate

from the operations that the planner's program has, the kernels that the GPU's library
launches for each, and [their machine code](../../../internal/testkit/sass/machine-code.txt)
for sm_90, for an H200. Only the section of a step counts. What is launched runs one after the
other: a product, then the kernels that follow it.

- A **product** takes a time for its call, and for each wave of tiles over the multiprocessors a
  time for the wave and one for each step along K. The three are fitted, by least squares of the
  relative error, to [products that others timed](products.tsv); the table below has the rest.
  A product takes its bytes over the memory's rate where that is longer.
- A **kernel** takes its bytes over the memory's rate, or its instructions where that is longer.
  Bytes are those of its launch's own parameters, and what it reads again where the card's cache
  does not hold it. Instructions are counted where they stand: a loop's body weighs as much as
  what surrounds it. How wide its accesses are is not counted.
- Each launch adds the time of a node of a CUDA graph.
- **Roofline** is the larger of bytes over the memory's rate and arithmetic over the tensor
  cores' or, without them, the fp32 rate.

`)
	t := tabwriter.NewWriter(w, 0, 0, 1, ' ', 0)
	fmt.Fprintln(t, "| term\t| value\t| source\t|\n| ---\t| ---\t| ---\t|")
	for _, x := range r.terms {
		fmt.Fprintf(t, "| %s\t| %.4g %s\t| %s\t|\n", x.name, x.value, x.unit, x.source)
	}
	_ = t.Flush() // errors of w are ignored
	for _, bits := range []int{16, 32} {
		f := r.fits[bits]
		fmt.Fprintf(w, "\nProducts of %d bits: a call %.2f µs, a wave %.2f µs and %.2f ns for each step along K.\n\n", bits, f[0]*1e6, f[1]*1e6, f[2]*1e9)
		fmt.Fprintln(t, "| card\t| product\t| timed µs\t| by the fit µs\t| difference\t|\n| ---\t| ---\t| ---\t| ---\t| ---\t|")
		for _, p := range r.products {
			if p.bits == bits {
				shape := fmt.Sprintf("%d × %d × %d", p.m, p.n, p.k)
				if p.batch > 1 {
					shape += fmt.Sprintf(", %d at once", p.batch)
				}
				fmt.Fprintf(t, "| %s\t| %s\t| %.1f\t| %.1f\t| %+.0f %%\t|\n", p.card, shape, p.seconds*1e6, p.expected*1e6, 100*(p.expected/p.seconds-1))
			}
		}
		_ = t.Flush()
	}
}

// independent are estimates of the cases by hand, in thousands of tokens/s.
var independent = map[int][2]float64{0: {440, 500}, 2: {45, 48}}

// compare prints the estimates by hand beside those of the page, and explains the differences.
func compare(w io.Writer, steps []*estimator, totals []float64) {
	fmt.Fprint(w, `
## Beside arithmetic by hand

Done before this page was, from the same programs, by a reader who took 450 to 600 TFLOP/s for
products of K = 768 and counted the kernels of then. In thousands of tokens/s:

| case | by hand | here | products alone here |
| --- | --- | --- | --- |
`)
	for i, c := range cases {
		hand, ok := independent[i]
		if !ok {
			continue
		}
		products := 0.0
		for _, r := range steps[i].rows {
			products += r.took["products"]
		}
		tokens := float64(c.rows*c.positions) / 1e3
		fmt.Fprintf(w, "| %s | %.0f to %.0f | %.1f | %.1f ms |\n", c.name, hand[0], hand[1], tokens/totals[i], products*1e3)
	}
	fmt.Fprint(w, differences)
}

// write writes a step's tables, the longest first.
func (e *estimator) write(w io.Writer, name string, tokens int) {
	list := slices.SortedFunc(maps.Values(e.rows), func(a, b *row) int {
		return cmp.Or(cmp.Compare(b.seconds, a.seconds), strings.Compare(a.kind+a.kernels, b.kind+b.kernels))
	})
	total, roof, matrix := e.seconds(), 0.0, 0.0
	for _, r := range list {
		roof += r.roof
		if strings.Contains(r.kernels, "cuBLASLt") || r.mix.Tensor > 0 {
			matrix += r.flops
		}
	}
	fmt.Fprintf(w, "\n## %s\n\nEstimate: **%.1f ms a step, %s tokens/s**; roofline %.1f ms. Products and attention are %.0f TFLOP/s of it.\n\n",
		name, total*1e3, thousands(float64(tokens)/total), roof*1e3, matrix/total/1e12)
	t := tabwriter.NewWriter(w, 0, 0, 1, ' ', 0)
	fmt.Fprintln(t, "| operation\t| kernels\t| times\t| GFLOP\t| GB\t| roofline µs\t| estimate µs\t| share\t| most by\t| of instructions: tensor, fp32, 16-byte accesses\t|")
	fmt.Fprintln(t, "| ---\t| ---\t| ---\t| ---\t| ---\t| ---\t| ---\t| ---\t| ---\t| ---\t|")
	for _, r := range list {
		mix := "–"
		if n := float64(r.mix.Total); n > 0 {
			mix = fmt.Sprintf("%.0f %%, %.0f %%, %.0f %%", 100*float64(r.mix.Tensor)/n, 100*float64(r.mix.Float)/n, 100*float64(r.mix.Load16+r.mix.Store16)/n)
		}
		fmt.Fprintf(t, "| %s\t| %s\t| %d\t| %.1f\t| %.2f\t| %.0f\t| %.0f\t| %.1f %%\t| %s\t| %s\t|\n",
			r.kind, r.kernels, r.times, r.flops/1e9, r.bytes/1e9, r.roof*1e6, r.seconds*1e6, 100*r.seconds/total, r.bound(), mix)
	}
	_ = t.Flush()
	e.writeProducts(w)
}

// writeProducts writes the products of a step by shape.
func (e *estimator) writeProducts(w io.Writer) {
	type shape struct {
		m, n, k int64
		wide    bool
	}
	times, each := map[shape]int{}, map[shape]float64{}
	for p, n := range e.made {
		s := shape{p.M, p.N, p.K, p.A.Type == graph.F32}
		times[s] += n
		each[s] = max(each[s], e.rates.product(p))
	}
	list := slices.SortedFunc(maps.Keys(times), func(a, b shape) int {
		return cmp.Or(cmp.Compare(float64(times[b])*each[b], float64(times[a])*each[a]), cmp.Compare(a.m, b.m), cmp.Compare(a.n, b.n), cmp.Compare(a.k, b.k))
	})
	fmt.Fprintln(w, "\nIts products by shape (M × N × K):")
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 1, ' ', 0)
	fmt.Fprintln(t, "| shape\t| times\t| µs each\t| TFLOP/s\t|\n| ---\t| ---\t| ---\t| ---\t|")
	for _, s := range list {
		fmt.Fprintf(t, "| %d × %d × %d\t| %d\t| %.1f\t| %.0f\t|\n", s.m, s.n, s.k, times[s], each[s]*1e6, 2*float64(s.m)*float64(s.n)*float64(s.k)/each[s]/1e12)
	}
	_ = t.Flush()
}

// differences explains the differences between both estimates.
const differences = `
By hand a step of 124M took 33 to 37 ms and one of 1.5B 340 to 365 ms. The differences:

- The gradient of norms was bound by latency: 4 to 8 ms of 124M's step and 15 to 30 ms of 1.5B's
  by hand. Its kernels were changed since, and layernorm_grad is 1.0 and 8.2 ms here.
- Attention read again what the cache had lost: 3.4 ms of 124M's step; 28 ms backward and 10 ms
  forward of 1.5B's. The order of tiles was changed since
  ([model](../attention/README.md)), and nothing of that is here.
- Without these two the arithmetic by hand has 27 ms and 300 ms from the middle of its ranges. Here
  are 2 ms and 8 ms more. Products of K = 768 agree: 503 to 546 TFLOP/s. What is more is in
  products of partial waves, which by hand were not counted: a weight gradient of
  1,600 × 6,400 has 325 tiles for 132 multiprocessors and takes 3 waves for 2.5.

An error of 20 % is likely: single products differ by that from the fit, and no kernel ran.
`
