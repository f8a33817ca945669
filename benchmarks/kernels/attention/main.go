// Command attention measures the CPU device's causal attention, forward and backward in float32,
// against PyTorch's on the same inputs.
//
//	go run ./benchmarks/kernels/attention -python /usr/bin/python3 -threads 2 -pairs 15 -csv pairs.csv
//
// A pair is one measurement of ours and one of PyTorch's, in turn, with the same number of threads.
// Each starts with a pause, in which the other's idle threads stop spinning, and an untimed call.
// Every pair is a line of the CSV; the table gives medians. Both results are compared before
// anything is timed. The peer is peer.py, beside this file. Its two layouts are a GPT-2 block's
// packed qkv, and PyTorch's best, contiguous heads with a ready mask.
package main

import (
	"bufio"
	_ "embed"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/benchmarks/bench"
	"github.com/spillway-ml/spillway/kernels/cpu/attn"
	"github.com/spillway-ml/spillway/kernels/cpu/level"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

//go:embed peer.py
var peerSource string

type options struct {
	python, layout, csv string
	threads, pairs      int
	pause               time.Duration
	shape               attn.Shape
}

func main() {
	o := options{shape: attn.Shape{Causal: true}}
	flag.StringVar(&o.python, "python", "python3", "Python with PyTorch")
	flag.StringVar(&o.layout, "layout", "block", "the peer's: block or contiguous")
	flag.StringVar(&o.csv, "csv", "", "file for all pairs")
	flag.IntVar(&o.threads, "threads", 2, "threads of both sides")
	flag.IntVar(&o.pairs, "pairs", 15, "pairs")
	flag.DurationVar(&o.pause, "pause", 300*time.Millisecond, "pause before each measurement")
	flag.IntVar(&o.shape.B, "batch", 4, "sequences")
	flag.IntVar(&o.shape.Tq, "seq", 1024, "positions a sequence")
	flag.IntVar(&o.shape.H, "heads", 12, "heads")
	flag.IntVar(&o.shape.D, "head-dim", 64, "channels a head")
	flag.Parse()
	o.shape.Tk, o.shape.KV = o.shape.Tq, o.shape.H
	if err := o.run(); err != nil {
		fmt.Fprintln(os.Stderr, "attention:", err)
		os.Exit(1)
	}
}

// ours has the operands and both passes of our side.
type ours struct {
	qkv, dy, y, dqkv []float32
	forward          attn.Forward[float32]
	backward         attn.Backward[float32]
	pool             *pool.Pool
}

func newOurs(s attn.Shape, threads int) *ours {
	c := s.H * s.D
	o := &ours{qkv: make([]float32, s.B*s.Tq*3*c), dy: make([]float32, s.B*s.Tq*c), y: make([]float32, s.B*s.Tq*c),
		dqkv: make([]float32, s.B*s.Tq*3*c), pool: pool.New(threads)}
	r := rand.New(rand.NewPCG(1, 2))
	for _, x := range [][]float32{o.qkv, o.dy, o.y, o.dqkv} {
		for i := range x {
			x[i] = float32(r.NormFloat64())
		}
	}
	lse := make([]float32, s.B*s.H*s.Tq)
	o.forward = attn.Forward[float32]{Shape: s, Q: o.qkv, K: o.qkv[c:], V: o.qkv[2*c:], LdQ: 3 * c, LdK: 3 * c, LdV: 3 * c,
		Y: o.y, Lse: lse, Work: make([]float32, attn.ForwardWorkspace(s))}
	o.backward = attn.Backward[float32]{Shape: s, Q: o.qkv, K: o.qkv[c:], V: o.qkv[2*c:], LdQ: 3 * c, LdK: 3 * c, LdV: 3 * c,
		Y: o.y, Dy: o.dy, Lse: lse, Work: make([]float32, attn.BackwardWorkspace(s)),
		Dq: o.dqkv, Dk: o.dqkv[c:], Dv: o.dqkv[2*c:], LdDq: 3 * c, LdDk: 3 * c, LdDv: 3 * c}
	return o
}

// run returns the seconds of the forward and of the backward pass.
func (o *ours) run() (forward, backward float64, err error) {
	start := time.Now()
	if err := o.forward.Run(o.pool); err != nil {
		return 0, 0, err
	}
	forward = time.Since(start).Seconds()
	err = o.backward.Run(o.pool)
	return forward, time.Since(start).Seconds() - forward, err
}

// peer is a running peer.py.
type peer struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *bufio.Scanner
	title string
}

func startPeer(o *options, folder string) (*peer, error) {
	s := o.shape
	args := []string{"-c", peerSource, o.layout}
	for _, n := range []int{s.B, s.Tq, s.H, s.D, o.threads} {
		args = append(args, strconv.Itoa(n))
	}
	p := &peer{cmd: exec.Command(o.python, append(args, folder)...)}
	p.cmd.Stderr = os.Stderr
	in, err := p.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.in, p.out = in, bufio.NewScanner(out)
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	p.title, err = p.line()
	return p, err
}

func (p *peer) line() (string, error) {
	if !p.out.Scan() {
		return "", fmt.Errorf("the PyTorch peer ended: %v", p.cmd.Wait())
	}
	return p.out.Text(), nil
}

func (p *peer) run() (float64, error) {
	if _, err := fmt.Fprintln(p.in); err != nil {
		return 0, err
	}
	l, err := p.line()
	if err != nil {
		return 0, err
	}
	return strconv.ParseFloat(strings.TrimSpace(l), 64)
}

func writeFloats(path string, x []float32) error {
	b, err := binary.Append(nil, binary.LittleEndian, x)
	if err != nil {
		return err
	}
	return os.WriteFile(path, b, 0o600)
}

// difference returns the largest difference between x and the file's values, relative to the
// largest value.
func difference(path string, x []float32) (float64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	if len(b) != 4*len(x) {
		return 0, fmt.Errorf("%s has %d bytes, must have %d", filepath.Base(path), len(b), 4*len(x))
	}
	var most, diff float64
	for i, v := range x {
		w := float64(math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:])))
		most, diff = max(most, math.Abs(w)), max(diff, math.Abs(float64(v)-w))
	}
	return diff / most, nil
}

func (o *options) run() error {
	if err := level.Err(); err != nil {
		return err
	}
	folder, err := os.MkdirTemp("", "attention")
	if err != nil {
		return err
	}
	defer os.RemoveAll(folder)
	mine := newOurs(o.shape, o.threads)
	defer mine.pool.Close()
	if _, _, err := mine.run(); err != nil {
		return err
	}
	for name, x := range map[string][]float32{"qkv.bin": mine.qkv, "dy.bin": mine.dy} {
		if err := writeFloats(filepath.Join(folder, name), x); err != nil {
			return err
		}
	}
	theirs, err := startPeer(o, folder)
	if err != nil {
		return err
	}
	defer func() {
		_ = theirs.in.Close()
		_ = theirs.cmd.Wait()
	}()
	for name, x := range map[string][]float32{"y.bin": mine.y, "dqkv.bin": mine.dqkv} {
		d, err := difference(filepath.Join(folder, name), x)
		if err != nil {
			return err
		}
		if !(d < 1e-5) {
			return fmt.Errorf("%s differs by %g of its largest value", name, d)
		}
	}
	var out io.Writer = io.Discard
	if o.csv != "" {
		f, err := os.Create(o.csv)
		if err != nil {
			return err
		}
		defer f.Close()
		out = f
	}
	s := o.shape
	fmt.Printf("level %s, against %s (%s), %d threads, causal %d × %d heads × %d × %d\n", level.Current(), theirs.title, o.layout, o.threads, s.B, s.H, s.Tq, s.D)
	fmt.Fprintln(out, "layout,threads,B,H,T,D,pair,forward_s,backward_s,pytorch_s")
	var fw, bw, all, peers, ratios []float64
	for i := range o.pairs {
		time.Sleep(o.pause)
		if _, _, err := mine.run(); err != nil {
			return err
		}
		f, b, err := mine.run()
		if err != nil {
			return err
		}
		time.Sleep(o.pause)
		t, err := theirs.run()
		if err != nil {
			return err
		}
		fw, bw, all, peers, ratios = append(fw, f), append(bw, b), append(all, f+b), append(peers, t), append(ratios, t/(f+b))
		fmt.Fprintf(out, "%s,%d,%d,%d,%d,%d,%d,%.5f,%.5f,%.5f\n", o.layout, o.threads, s.B, s.H, s.Tq, s.D, i, f, b, t)
	}
	// The visible half of 2 products forward and 5 backward.
	flop := 7 * float64(s.D) * float64(s.B*s.H) * float64(s.Tq) * float64(s.Tq+1)
	fmt.Printf("forward %.1f ms, backward %.1f ms, both %.1f ms (%.0f GFLOP/s); PyTorch %.1f ms; ratio %.1f (least %.1f)\n",
		1e3*bench.Median(fw), 1e3*bench.Median(bw), 1e3*bench.Median(all), flop/bench.Median(all)/1e9, 1e3*bench.Median(peers), bench.Median(ratios), slices.Min(ratios))
	return nil
}
