// Command gpucheck runs the checks that need a GPU, on a machine with a driver and CUDA's libraries
// but without Go. It writes results.json and results.md. It runs every device test and compares
// each kernel with the CPU and losses with PyTorch's. It checks that sharding does not change bits,
// that memory is as planned, and the memory wall. It compares step times with PyTorch's.
//
// `make gpu` builds it into a folder with everything that it runs; run.sh there starts it. Slow
// parts have their own time limits, and results are written as they arrive.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// bundle holds the paths and the devices of a run.
type bundle struct {
	self    string                                                 // this program
	dir     string                                                 // of this program: spillway, tests/, torch_gpt2.py
	out     string                                                 // results, of which the archive has the logs too
	work    string                                                 // logs, weights, tokens, metrics; removed at the end
	device  string                                                 // cuda; cpu to try this program without a GPU
	quick   bool                                                   // tiny models, likewise
	torchIs chan torchFound                                        // nil: it was received
	python  string                                                 // that has torch; empty if none was found
	gpu     *gpu                                                   // nil: on the CPU
	meet    func(add func(name, format string, args ...any)) error // finds the GPU; nil: the machine's
}

// part is one of the checks.
type part struct {
	name, title string
	limit       time.Duration
	torch       bool // it has a side of PyTorch's
	run         func(ctx context.Context, b *bundle, r *result)
}

// parts are in order of importance, because the time may run out.
var parts = []part{
	{"contact", "First contact: each call once, latencies, rates, memory", 40 * time.Second, false, runContact},
	{"compile", "All kernels compiled, a process for each core", 60 * time.Second, false, runCompile},
	{"tests", "Device tests, and each kernel against the CPU, a process each, 14 at a time", 60 * time.Second, false, runTests},
	{"bits", "The same bits at every stage, recompute and offload, 1 and 4 ranks on one card", 60 * time.Second, false, runBits},
	{"losses", "GPT-2 124M: 20 fp32 losses against PyTorch's; memory as planned", 80 * time.Second, true, runLosses},
	{"wall", "A cap under what the plan needs is refused", 30 * time.Second, false, runWall},
	{"speed-124m", "Step time of GPT-2 124M, batch 16, bf16", 130 * time.Second, true, speed("gpt2")},
	{"speed-1.5b", "Step time of GPT-2 1.5B, batch 16, bf16", 240 * time.Second, true, speed("gpt2-xl")},
	{"kernels", "Each kernel at the shapes of 124M and 1.5B, and every algorithm of cuBLASLt", 100 * time.Second, false, runMicro},
	{"peers", "Copies between GPUs, and the bits of one GPU on several", 60 * time.Second, false, runPeers},
	{"sanitizers", "Kernels' tests under compute-sanitizer, where it is", 150 * time.Second, false, runSanitizers},
	{"profilers", "A training run under nsys and ncu, where they are", 140 * time.Second, false, runProfilers},
}

func main() {
	b := &bundle{torchIs: make(chan torchFound, 1)}
	child := flag.String("child", "", "for this program's own use: look, memory, compile, contact, peers, kernels or breakdown")
	shape := flag.String("shape", "124m", "of -child kernels and breakdown: 124m, 1.5b or tiny")
	prec := flag.String("precision", "bf16", "of -child kernels and breakdown: fp32, bf16 or fp16")
	source := flag.String("source", "", "of -child compile")
	uuid := flag.String("uuid", "", "of -child memory")
	budget := flag.Duration("budget", 15*time.Minute, "time for all of it")
	flag.StringVar(&b.out, "out", "results", "folder of the results")
	flag.StringVar(&b.device, "device", "cuda", "cuda, or cpu to try this program without a GPU")
	flag.BoolVar(&b.quick, "quick", false, "tiny models, to try this program")
	only := flag.String("only", "", "some parts alone, with commas between: contact, compile, tests, bits, losses, wall, speed-124m, speed-1.5b, kernels, peers, sanitizers or profilers")
	flag.StringVar(&b.python, "python", "", "python3 with torch; looked for if not given")
	flag.Parse()
	if *child != "" {
		if err := runChild(*child, *shape, *prec, *source, *uuid); err != nil {
			fmt.Fprintln(os.Stderr, "gpucheck:", err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, *budget)
	defer cancel()
	code, err := check(ctx, b, *only)
	if err != nil {
		fmt.Fprintln(os.Stderr, "gpucheck:", err)
	}
	cancel()
	stop()
	os.Exit(code)
}

// attempt runs a part. It reports a failure that ends the part, and the next part still runs.
func attempt(ctx context.Context, p part, b *bundle, r *result) {
	defer func() {
		if v := recover(); v != nil {
			r.fail("broken invariant of gpucheck: %v", v)
		}
	}()
	p.run(ctx, b, r)
}

// check runs the parts. It returns exit status 0 if all passed or were skipped with a stated
// reason, else 1.
func check(ctx context.Context, b *bundle, only string) (int, error) {
	if b.dir == "" {
		var err error
		if b.self, err = os.Executable(); err != nil {
			return 1, err
		}
		b.dir = filepath.Dir(b.self)
	}
	var err error
	if err := os.MkdirAll(b.out, 0o755); err != nil {
		return 1, err
	}
	if b.out, err = filepath.Abs(b.out); err != nil {
		return 1, err
	}
	if b.work, err = os.MkdirTemp("", "gpucheck-*"); err != nil {
		return 1, err
	}
	defer func() { _ = os.RemoveAll(b.work) }()
	if err := os.Mkdir(filepath.Join(b.work, "logs"), 0o755); err != nil {
		return 1, err
	}
	doc := &document{Started: time.Now().UTC().Format(time.RFC3339), Device: b.device, Quick: b.quick}
	if err := b.look(ctx, doc); err != nil {
		doc.Missing = err.Error()
		if e := b.keep(doc); e != nil {
			return 1, e
		}
		return 1, err
	}
	if err := b.keep(doc); err != nil {
		return 1, err
	}
	failed := false
	for _, p := range parts {
		if only != "" && !slices.Contains(strings.Split(only, ","), p.name) {
			continue
		}
		r := &result{Name: p.name, Title: p.title}
		if p.torch {
			b.wantTorch(doc)
		}
		start := time.Now()
		limit, cancel := context.WithTimeout(ctx, p.limit)
		if ctx.Err() != nil {
			r.skip("no time was left for it")
		} else {
			fmt.Printf("== %s\n", p.title)
			attempt(limit, p, b, r)
		}
		if r.Status == "" {
			r.Status = passed
		}
		switch {
		case r.Status == skipped:
		case errors.Is(ctx.Err(), context.Canceled):
			r.fail("was ended by a signal")
		case ctx.Err() != nil:
			r.fail("the time of the whole bundle ran out")
		case limit.Err() != nil:
			r.fail("ran out of its time of %v", p.limit)
		}
		cancel()
		r.Seconds = time.Since(start).Seconds()
		fmt.Printf("   %s in %.0f s\n", r.Status, r.Seconds)
		for _, l := range r.Lines {
			fmt.Println("   " + l)
		}
		failed = failed || r.Status == failedStatus
		doc.Parts = append(doc.Parts, r)
		if err := b.keep(doc); err != nil {
			return 1, err
		}
		if errors.Is(ctx.Err(), context.Canceled) {
			break
		}
	}
	doc.Finished = time.Now().UTC().Format(time.RFC3339)
	if err := b.keep(doc); err != nil {
		return 1, err
	}
	fmt.Println(doc.brief(b.work, briefRunes))
	if failed {
		return 1, nil
	}
	return 0, nil
}
