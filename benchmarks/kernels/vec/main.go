// Command vec measures the CPU device's optimizer and elementwise kernels against the machine's
// copy bandwidth.
//
//	go run ./benchmarks/kernels/vec -threads 1,2 -pairs 15 -csv pairs.csv
//
// A pair is one run of a kernel and one copy of the same number of bytes, in turn, with the same
// number of threads, over filled buffers. Bytes are counted once for each array that is read and
// once for each that is written, for kernel and copy alike. Every pair is a line of the CSV; the
// table gives medians.
package main

import (
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/benchmarks/bench"
	"github.com/spillway-ml/spillway/kernels/cpu/exact"
	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

func main() {
	threads := flag.String("threads", "1,2", "numbers of threads")
	pairs := flag.Int("pairs", 15, "pairs a kernel")
	elems := flag.Int("elems", 64<<20, "elements of the optimizers' parameter; others take a share")
	only := flag.String("kernel", "", "only kernels whose name contains this")
	csv := flag.String("csv", "", "file for all pairs")
	flag.Parse()
	if err := run(*threads, *pairs, *elems, *only, *csv); err != nil {
		fmt.Fprintln(os.Stderr, "vec:", err)
		os.Exit(1)
	}
}

type runner interface{ Run(*pool.Pool) error }

// kernel is a kernel over n elements that moves bytes of memory.
type kernel struct {
	name  string
	bytes int
	make  func(b *buffers) runner
}

// buffers hands out filled arrays of one size.
type buffers struct {
	n    int
	free [][]float32
	used int
}

func (b *buffers) next() []float32 {
	if b.used == len(b.free) {
		x := make([]float32, b.n)
		for i := range x {
			x[i] = float32(i%1021)/1021 + 0.01
		}
		b.free = append(b.free, x)
	}
	b.used++
	return b.free[b.used-1]
}

func benches(n int) []kernel {
	moments := func(b *buffers) vec.Moments {
		return vec.Moments{P: b.next(), G: b.next(), M: b.next(), V: b.next(), AdamStep: vec.AdamStep{GradScale: 1, LR: 1e-6,
			Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, BC1: 1, BC2: 1}}
	}
	tree := func(r int) kernel {
		return kernel{fmt.Sprintf("sum of %d buffers", r), 4 * (r + 1) * n, func(b *buffers) runner {
			k := &vec.SumTree{Dst: b.next()}
			for range r {
				k.Srcs = append(k.Srcs, b.next())
			}
			return k
		}}
	}
	return []kernel{
		{"adamw", 28 * n, func(b *buffers) runner { return &vec.AdamW{Moments: moments(b)} }},
		{"adamw, bf16 copy out", 30 * n, func(b *buffers) runner {
			return &vec.AdamW{Moments: moments(b), Low: make([]uint16, n), LowAs: vec.BF16}
		}},
		{"lamb direction", 28 * n, func(b *buffers) runner { return &vec.LAMBDirection{Moments: moments(b)} }},
		{"sgd with momentum", 20 * n, func(b *buffers) runner {
			return &vec.Momentum{P: b.next(), G: b.next(), B: b.next(), GradScale: 1, Rate: 1, Momentum: 0.9, Step: 1e-6}
		}},
		{"square norm", 4 * n, func(b *buffers) runner { return &vec.SqSum{X: b.next(), Acc: make([]int64, exact.Limbs)} }},
		tree(2), tree(4), tree(8),
		{"add", 12 * n, func(b *buffers) runner { return &vec.Binary[float32]{A: b.next(), B: b.next(), Y: b.next()} }},
		{"gelu", 8 * n, func(b *buffers) runner { return &vec.Activation[float32]{X: b.next(), Y: b.next()} }},
		{"layernorm", 8 * n, func(b *buffers) runner {
			const c = 1024
			rows := n / c
			return &vec.LayerNorm[float32]{N: rows, C: c, X: b.next()[:rows*c], Gamma: make([]float32, c), Beta: make([]float32, c),
				Eps: 1e-5, Y: b.next()[:rows*c], Mean: make([]float32, rows), Rstd: make([]float32, rows)}
		}},
	}
}

// halves copies a buffer in one piece per thread, so that the runtime's copy can use its methods
// for large sizes.
type halves struct {
	dst, src []float32
	pieces   int
}

func (h *halves) RunIndex(i int) {
	lo, hi := len(h.src)*i/h.pieces, len(h.src)*(i+1)/h.pieces
	copy(h.dst[lo:hi], h.src[lo:hi])
}

func run(threads string, pairs, elems int, only, csv string) error {
	if err := level.Err(); err != nil {
		return err
	}
	if elems < 1024 || pairs < 1 {
		return fmt.Errorf("-elems %d -pairs %d, want at least 1024 and 1", elems, pairs)
	}
	lines := []string{"kernel,threads,pair,kernel_seconds,copy_seconds,bytes"}
	fmt.Printf("level %v, %d elements, %d pairs\n", level.Current(), elems, pairs)
	fmt.Printf("%-24s %8s %12s %12s %8s\n", "kernel", "threads", "GB/s", "copy GB/s", "ratio")
	bufs := &buffers{n: elems}
	for _, field := range strings.Split(threads, ",") {
		t, err := strconv.Atoi(field)
		if err != nil || t < 1 {
			return fmt.Errorf("-threads has %q, want numbers from 1 up", field)
		}
		p := pool.New(t)
		for _, b := range benches(elems) {
			if !strings.Contains(b.name, only) {
				continue
			}
			bufs.used = 0
			c := &halves{dst: bufs.next(), src: bufs.next(), pieces: t}
			k := b.make(bufs)
			var ours, copies, ratios []float64
			for i := range pairs {
				start := time.Now()
				if err := k.Run(p); err != nil {
					return err
				}
				mid := time.Now()
				moved := 0
				for moved < b.bytes { // complete copies, scaled to the kernel's bytes
					p.Run(t, c)
					moved += 8 * elems
				}
				a, z := mid.Sub(start).Seconds(), time.Since(mid).Seconds()*float64(b.bytes)/float64(moved)
				ours, copies, ratios = append(ours, a), append(copies, z), append(ratios, z/a)
				lines = append(lines, fmt.Sprintf("%s,%d,%d,%g,%g,%d", strings.ReplaceAll(b.name, ",", ""), t, i, a, z, b.bytes))
			}
			gb := float64(b.bytes) / 1e9
			fmt.Printf("%-24s %8d %12.1f %12.1f %8.2f\n", b.name, t, gb/bench.Median(ours), gb/bench.Median(copies), bench.Median(ratios))
		}
		p.Close()
	}
	if csv == "" {
		return nil
	}
	return os.WriteFile(csv, []byte(strings.Join(lines, "\n")+"\n"), 0o644)
}
