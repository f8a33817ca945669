//go:build unix

// Command precision measures what 16 bits and int8 gain, each pair in turn in one run:
// a GPT-2 124M step of 4 rows of 256 tokens in bf16 against fp32, with int8 products
// against bf16, and AdamW with moments in 8 bits against fp32 ones, by parameter.
//
//	go run ./benchmarks/precision -spillway BINARY -pairs 9
//
// With -peer, a command that trains with PyTorch, it compares losses instead (-losses N)
// and times steps of both programs:
//
//	go run ./benchmarks/precision -spillway BINARY -peer "python3 torch_gpt2.py" -model DIR -data FILE -losses 50
//
// Steps are timed by benchmarks/step, which stops one program while the other computes
// and reports processor time beside the clock's. The weights are the model's random
// ones and the tokens are drawn: neither changes how long a step takes.
package main

import (
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"time"

	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

func main() {
	command := flag.String("spillway", "", "the command to measure; empty: steps are left out")
	pairs := flag.Int("pairs", 9, "pairs of steps, and of updates, that count")
	threads := flag.Int("threads", runtime.NumCPU(), "threads of a program")
	other := flag.String("peer", "", "a command that trains with PyTorch: it takes --model, --data, --batch, --seq, --steps, --threads, --lr, --dtype")
	model := flag.String("model", "", "with -peer: the checkpoint that both begin with")
	data := flag.String("data", "", "with -peer: a file of uint16 tokens")
	losses := flag.Int("losses", 0, "with -peer: steps whose losses are compared; 0: steps of 4 × 256 tokens are timed")
	batch := flag.Int("batch", 4, "with -losses: rows of a step")
	seq := flag.Int("seq", 128, "with -losses: tokens of a row")
	lr := flag.Float64("lr", 3e-4, "with -peer: the learning rate")
	flag.Parse()
	p, err := newPeer(*other, *model, *data, *threads, *lr)
	switch {
	case err != nil:
	case p != nil && *losses > 0:
		err = p.losses(*command, *batch, *seq, *losses)
	case p != nil:
		err = against(p, *command, *pairs)
	default:
		err = run(*command, *pairs, *threads)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "precision:", err)
		os.Exit(1)
	}
}

func run(spillway string, pairs, threads int) error {
	if pairs < 1 || threads < 1 {
		return fmt.Errorf("-pairs %d, -threads %d, want at least 1 each", pairs, threads)
	}
	for _, t := range slices.Compact([]int{1, threads}) {
		if err := updates(pairs, t); err != nil {
			return err
		}
	}
	if spillway == "" {
		return nil
	}
	return steps(spillway, pairs, threads)
}

// updates prints the time of a parameter's update with moments in 8 bits over that with
// fp32 ones, of arrays that no cache holds.
func updates(pairs, threads int) error {
	const n = 1 << 25
	r := rand.New(rand.NewPCG(1, 2))
	numbers := func(n int) []float32 {
		x := make([]float32, n)
		for i := range x {
			x[i] = r.Float32() + 0.01
		}
		return x
	}
	p, g, m, v := numbers(n), numbers(n), numbers(n), numbers(n)
	full := &vec.AdamW{Moments: vec.Moments{P: p, G: g, M: m, V: v, GradScale: 1, LR: 1e-6,
		Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, BC1: 1, BC2: 1}}
	blocks := vec.Q8Blocks(n)
	small := &vec.AdamW8{P: p, G: g, M: make([]byte, n), V: make([]byte, n), MScale: make([]float32, blocks), VScale: make([]float32, blocks),
		GradScale: 1, LR: 1e-6, Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1, BC1: 1, BC2: 1}
	pl := pool.New(threads)
	defer pl.Close()
	var ns [2][]float64
	var ratios []float64
	for i := range pairs + 1 { // the first pair touches the memory
		var took [2]float64
		for j, k := range []vec.Kernel{full, small} {
			began := time.Now()
			if err := k.Run(pl); err != nil {
				return err
			}
			took[j] = float64(time.Since(began).Nanoseconds()) / n
		}
		if i > 0 {
			ns[0], ns[1] = append(ns[0], took[0]), append(ns[1], took[1])
			ratios = append(ratios, took[1]/took[0])
		}
	}
	fmt.Printf("AdamW, %d threads: fp32 moments %.2f ns a parameter (least %.2f), 8 bits %.2f (%.2f); ratio %.3f (least %.3f, most %.3f) of %d pairs; bar 1.25\n",
		threads, median(ns[0]), slices.Min(ns[0]), median(ns[1]), slices.Min(ns[1]),
		median(ratios), slices.Min(ratios), slices.Max(ratios), pairs)
	return nil
}

func median(x []float64) float64 {
	s := slices.Sorted(slices.Values(x))
	return s[len(s)/2]
}

// steps prints pairs of whole steps.
func steps(spillway string, pairs, threads int) error {
	spillway, err := filepath.Abs(spillway)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "precision-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	data := filepath.Join(dir, "tokens.bin")
	if err := tokens(data, 200_000); err != nil {
		return err
	}
	step, err := buildStep(dir)
	if err != nil {
		return err
	}
	const warm = 2
	command := func(precision string) string {
		return fmt.Sprintf("%s train --model gpt2 --data %s --order sequential --batch 4 --seq 256 --steps %d --threads %d --metrics /dev/stdout %s",
			spillway, data, pairs+warm+1, threads, precision)
	}
	for _, c := range []struct{ title, a, b string }{
		{"fp32 (b) over bf16 (a): bars 1.6 with bf16 dot products, 2.7 with AMX", "--precision bf16", "--precision fp32"},
		{"bf16 (b) over bf16 with --int8 matmul (a): bars 1.12 with VNNI, 1.04 with AMX", "--precision bf16 --int8 matmul", "--precision bf16"},
	} {
		if err := timed(step, c.title, command(c.a), command(c.b), pairs, warm); err != nil {
			return err
		}
	}
	return nil
}

// buildStep builds benchmarks/step into dir.
func buildStep(dir string) (string, error) {
	step := filepath.Join(dir, "step")
	if out, err := exec.Command("go", "build", "-o", step, "./benchmarks/step").CombinedOutput(); err != nil {
		return "", fmt.Errorf("building benchmarks/step (run it from the repository's root): %w\n%s", err, out)
	}
	return step, nil
}

// timed prints pairs of steps of two commands.
func timed(step, title, a, b string, pairs, warm int) error {
	fmt.Printf("\n%s\n", title)
	k := exec.Command(step, "-pairs", strconv.Itoa(pairs), "-warm", strconv.Itoa(warm), "-a", a, "-b", b)
	k.Stdout, k.Stderr = os.Stdout, os.Stderr
	if err := k.Run(); err != nil {
		return fmt.Errorf("%s: %w", title, err)
	}
	return nil
}

// against times steps of both programs.
func against(p *peer, spillway string, pairs int) error {
	if spillway == "" || pairs < 1 {
		return fmt.Errorf("-spillway %q, -pairs %d: name the command and at least one pair", spillway, pairs)
	}
	spillway, err := filepath.Abs(spillway)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "precision-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	step, err := buildStep(dir)
	if err != nil {
		return err
	}
	return p.speed(spillway, step, pairs, 2)
}

// tokens writes a token file of n numbers of GPT-2's vocabulary.
func tokens(path string, n int) error {
	r := rand.New(rand.NewPCG(3, 4))
	var b []byte
	for range n {
		b = binary.LittleEndian.AppendUint16(b, uint16(r.IntN(50257)))
	}
	return os.WriteFile(path, b, 0o644)
}
