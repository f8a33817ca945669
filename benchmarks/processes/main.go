//go:build linux

// Command processes measures ranks in several processes, in pairs that run in turn, and
// prints a page's table of it with the bars.
//
//	go run ./benchmarks/processes comm    # all-reduces: shared memory, MPI, a C loop, the copy bound
//	go run ./benchmarks/processes train   # GPT-2 124M steps: ZeRO-3, ZeRO-0, one process, a peer
package main

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "processes:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("comm or train: what is to be measured")
	}
	fs := flag.NewFlagSet(args[0], flag.ExitOnError)
	binary := fs.String("spillway", "", "the `program`; built from here where it is not given")
	rounds := fs.Int("rounds", 5, "rounds: in each, every side runs once (comm) or takes a step (train)")
	var t training
	fs.StringVar(&t.model, "model", "", "train: `DIR` of GPT-2 124M with its weights")
	fs.StringVar(&t.data, "data", "", "train: token `FILE`")
	fs.StringVar(&t.precision, "precision", "fp32", "train: fp32, bf16 or fp16; the peer's command says its own")
	fs.IntVar(&t.batch, "batch", 2, "train: rows a rank")
	fs.IntVar(&t.seq, "seq", 256, "train: tokens a row")
	fs.StringVar(&t.peer, "peer", "", "train: a `command` that trains the same on 2 processes and prints a line that starts with { a step")
	if err := fs.Parse(args[1:]); err != nil {
		return err
	}
	if fs.NArg() > 0 || *rounds < 1 {
		return fmt.Errorf("%q with %d rounds: flags alone, and a round at least", fs.Args(), *rounds)
	}
	dir, err := os.MkdirTemp("", "processes-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if *binary == "" {
		*binary = filepath.Join(dir, "spillway")
		if out, err := exec.Command("go", "build", "-o", *binary, "./cmd/spillway").CombinedOutput(); err != nil {
			return fmt.Errorf("build spillway (in the repository's root, or give -spillway): %w: %s", err, out)
		}
	}
	fmt.Printf("%s, %s, %s, %d cores; `go run ./benchmarks/processes %s`\n\n", time.Now().UTC().Format(time.DateOnly), commit(), processor(), runtime.NumCPU(), strings.Join(args, " "))
	switch args[0] {
	case "comm":
		return measureComm(*binary, dir, *rounds)
	case "train":
		t.binary, t.rounds = *binary, *rounds
		return t.measure()
	}
	return fmt.Errorf("%q: comm or train", args[0])
}

func commit() string {
	if out, err := exec.Command("git", "describe", "--always", "--dirty").Output(); err == nil {
		return "commit " + strings.TrimSpace(string(out))
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		return info.Main.Version
	}
	return "an unknown commit"
}

func processor() string {
	text, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(text)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
			return strings.TrimSpace(v)
		}
	}
	return runtime.GOARCH
}

// spread is the median of values with the least and the most.
func spread(v []float64, format string) string {
	if len(v) == 0 {
		return "–"
	}
	s := slices.Sorted(slices.Values(v))
	return fmt.Sprintf("%s (%s to %s)", fmt.Sprintf(format, s[len(s)/2]), fmt.Sprintf(format, s[0]), fmt.Sprintf(format, s[len(s)-1]))
}

// ratios divides pair by pair.
func ratios(a, b []float64) (r []float64) {
	for i := range min(len(a), len(b)) {
		r = append(r, a[i]/b[i])
	}
	return r
}

// met says whether the median of v keeps to a bar: at most, or at least where least.
func met(v []float64, bar float64, least bool) string {
	if len(v) == 0 {
		return "not measured"
	}
	s := slices.Sorted(slices.Values(v))
	c := cmp.Compare(s[len(s)/2], bar)
	if c == 0 || least == (c > 0) {
		return "yes"
	}
	return "no"
}
