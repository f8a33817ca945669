//go:build unix

// Command gemm measures the CPU device's matrix products against OpenBLAS (float32) and oneDNN
// (bf16 and int8), which it opens at run time.
//
//	go run ./benchmarks/kernels/gemm -op f32 -threads 1,2 -pairs 15 -csv pairs.csv
//
// A pair is one measurement of ours and one of theirs, in turn, on the same filled buffers and with
// the same number of threads. Each starts with a pause, in which the other's idle threads stop
// spinning, and an untimed call. Every pair is a line of the CSV. The table gives medians, and the
// ratio of both sides' best times ("best"), which is more reliable on a shared machine. Packing is
// timed on both sides.
//
// The last column compares with a reference, measured in the same turns: the median of the pairs'
// ratios, and the ratio of best times. For float32 the reference is a loop of FMA instructions that
// reads nothing. For bf16 and int8 it is our float32 product of that shape.
package main

import (
	"flag"
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/benchmarks/bench"
	"github.com/spillway-ml/spillway/kernels/cpu/gemm"
	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

type shape struct {
	name string
	spec gemm.Spec
}

// shapes are the measured shapes: two squares, then the products of a GPT-2 124M step over 1,024
// tokens. Weights are stored (in,out), except the tied head's (out,in).
func shapes() []shape {
	s := []shape{
		{"square", gemm.Forward(1024, 1024, 1024, false)},
		{"square", gemm.Forward(2048, 2048, 2048, false)},
	}
	for _, l := range []struct {
		name    string
		in, out int
		head    bool
	}{{"qkv", 768, 2304, false}, {"proj", 768, 768, false}, {"up", 768, 3072, false}, {"down", 3072, 768, false}, {"head", 768, 50257, true}} {
		s = append(s,
			shape{l.name + ".fwd", gemm.Forward(1024, l.in, l.out, l.head)},
			shape{l.name + ".dX", gemm.InputGradient(1024, l.in, l.out, l.head)},
			shape{l.name + ".dW", gemm.WeightGradient(1024, l.in, l.out, l.head)})
	}
	return s
}

// product is our and their product on the same operands. If the op is not float32, ours32 is our
// float32 product of that shape.
type product struct {
	ours, theirs, ours32 func()
}

// aside measures f in a separate goroutine, as in a training step. The main goroutine is locked to
// its thread, because the libraries need that.
func aside(f func(), t timing) float64 {
	result := make(chan float64)
	go func() { result <- measure(f, t) }()
	return <-result
}

func main() {
	op := flag.String("op", "f32", "f32, bf16 or int8")
	threads := flag.String("threads", "1,2", "numbers of threads")
	pairs := flag.Int("pairs", 15, "pairs a shape")
	only := flag.String("shape", "", "only shapes whose name or size contains this")
	csv := flag.String("csv", "", "file for all pairs")
	pause := flag.Duration("pause", 60*time.Millisecond, "pause before each measurement")
	least := flag.Duration("least", 30*time.Millisecond, "least time of a measurement; short calls repeat")
	wait := flag.Duration("wait", 0, "how long to repeat the pause at most while other processes compute in it")
	flag.Parse()
	if err := run(*op, *threads, *pairs, *only, *csv, timing{*pause, *least, *wait}); err != nil {
		fmt.Fprintln(os.Stderr, "gemm:", err)
		os.Exit(1)
	}
}

func run(op, threads string, pairs int, only, csv string, t timing) error {
	runtime.LockOSThread() // OpenMP and OpenBLAS keep their threads per calling thread
	if err := level.Err(); err != nil {
		return err
	}
	lib, err := open(op)
	if err != nil {
		return err
	}
	fmt.Printf("level %s, against %s\n", level.Current(), lib.name)
	var out *os.File
	if csv != "" {
		if out, err = os.Create(csv); err != nil {
			return err
		}
		defer out.Close()
		fmt.Fprintln(out, "op,threads,shape,M,N,K,pair,ours_gops,theirs_gops,ours_f32_gops")
	}
	for _, text := range strings.Split(threads, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			return fmt.Errorf("threads %q: numbers of threads are like 1,2", threads)
		}
		pl := pool.New(n)
		lib.setThreads(n)
		last := "of FMA peak"
		if op != "f32" {
			last = "of our f32, best"
		}
		var toLib, toF32 summary
		fmt.Printf("\n%d threads\n%-10s %6s %6s %6s  %8s %8s  %7s  %6s  %s\n", n, "shape", "M", "N", "K", "ours", "theirs", "ratio", "best", last)
		for _, s := range shapes() {
			size := fmt.Sprintf("%dx%dx%d", s.spec.M, s.spec.N, s.spec.K)
			if !strings.Contains(s.name+" "+size, only) {
				continue
			}
			b, err := lib.prepare(s.spec, pl)
			if err != nil {
				return err
			}
			if op != "f32" {
				if b.ours32, err = ourF32(s.spec, pl); err != nil {
					return err
				}
			}
			work := 2 * float64(s.spec.M) * float64(s.spec.N) * float64(s.spec.K)
			var ours, theirs, other []float64
			var ratio, toOther []float64
			for i := range pairs {
				o, th := work/aside(b.ours, t)/1e9, work/measure(b.theirs, t)/1e9
				f, csv32 := float64(n)*fmaPeak(), ""
				if b.ours32 != nil {
					f = work / aside(b.ours32, t) / 1e9
					csv32 = fmt.Sprintf("%.2f", f)
				}
				ours, theirs, other = append(ours, o), append(theirs, th), append(other, f)
				ratio, toOther = append(ratio, o/th), append(toOther, o/f)
				if out != nil {
					fmt.Fprintf(out, "%s,%d,%s,%d,%d,%d,%d,%.2f,%.2f,%s\n", op, n, s.name, s.spec.M, s.spec.N, s.spec.K, i, o, th, csv32)
				}
			}
			toLib.add(bench.Median(ratio))
			toF32.add(bench.Median(toOther))
			fmt.Printf("%-10s %6d %6d %6d  %8.1f %8.1f  %7.3f  %6.3f  %.2f", s.name, s.spec.M, s.spec.N, s.spec.K, bench.Median(ours), bench.Median(theirs), bench.Median(ratio), slices.Max(ours)/slices.Max(theirs), bench.Median(toOther))
			if b.ours32 != nil {
				fmt.Printf("  %.2f", slices.Max(ours)/slices.Max(other))
			}
			fmt.Println()
		}
		fmt.Println(toLib.String())
		if op != "f32" {
			fmt.Println("against our f32:", toF32.String())
		}
		pl.Close()
	}
	return nil
}

// summary collects ratios; String gives their geometric mean and the smallest.
type summary struct{ ratios []float64 }

func (s *summary) add(r float64) { s.ratios = append(s.ratios, r) }

func (s *summary) String() string {
	var logs float64
	for _, r := range s.ratios {
		logs += math.Log(r)
	}
	return fmt.Sprintf("geometric mean %.3f, least %.3f", math.Exp(logs/float64(len(s.ratios))), slices.Min(s.ratios))
}

// timing sets the durations of a measurement.
type timing struct{ pause, least, wait time.Duration }

// measure returns the seconds of a call of f.
func measure(f func(), t timing) float64 {
	for until := time.Now().Add(t.wait); ; {
		before := busy()
		time.Sleep(t.pause)
		const most = 0.2 // of a core
		if time.Now().After(until) || busy()-before < most*t.pause.Seconds() {
			break
		}
	}
	f()
	start := time.Now()
	for n := 1; ; n++ {
		f()
		if d := time.Since(start); d >= t.least {
			return d.Seconds() / float64(n)
		}
	}
}

// busy returns the seconds that all cores have computed, in steps of 10 ms, or 0 if /proc/stat does
// not have it.
func busy() float64 {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	var user, nice, system float64
	if _, err := fmt.Sscanf(string(text), "cpu %f %f %f", &user, &nice, &system); err != nil {
		return 0
	}
	const ticks = 100 // per second
	return (user + nice + system) / ticks
}
