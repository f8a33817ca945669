// Command versions compares two builds of spillway in turn: a training step, its kernels by kind,
// and the demo.
//
//	go run ./benchmarks/versions -a OLD/spillway -b NEW/spillway -pairs 9
//
// Each pair runs both builds. The first build runs first in odd pairs and last in even ones, so
// that effects such as a machine that becomes warm apply to both alike. A figure is the median of
// its steps in one run. Of the pairs' ratios b/a the command prints the median and the spread.
// Processor time varies less than wall time on a shared machine.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spillway-ml/spillway/benchmarks/bench"
)

type options struct {
	a, b, model      string
	pairs            int
	steps, demoSteps int
	batch, seq       int
	jsonPath         string
}

func main() {
	var o options
	flag.StringVar(&o.a, "a", "", "the older binary")
	flag.StringVar(&o.b, "b", "", "the newer binary")
	flag.StringVar(&o.model, "model", "gpt2", "model of the step: a preset or a folder")
	flag.IntVar(&o.batch, "batch", 4, "rows of the step")
	flag.IntVar(&o.seq, "seq", 128, "tokens of a row")
	flag.IntVar(&o.steps, "steps", 4, "steps of a run; the first does not count")
	flag.IntVar(&o.demoSteps, "demo-steps", 40, "steps of the demo; the first does not count")
	flag.IntVar(&o.pairs, "pairs", 9, "pairs of runs")
	flag.StringVar(&o.jsonPath, "json", "", "write all pairs to this file")
	flag.Parse()
	bench.Main("versions", func() error {
		return bench.Scratch("", "versions", func(dir string) error { return run(o, dir) })
	})
}

// figures are seconds by name: "step", "step, processor", "linear" ….
type figures map[string]float64

// row is one figure of all pairs.
type row struct {
	What   string       `json:"what"`
	Pairs  [][2]float64 `json:"pairs"` // seconds of a and b
	Ratio  float64      `json:"median_ratio"`
	Lowest float64      `json:"lowest_ratio"`
	Most   float64      `json:"highest_ratio"`
}

func run(o options, dir string) (err error) {
	switch {
	case o.a == "" || o.b == "":
		return errors.New("-a and -b are needed: the two binaries")
	case o.pairs < 1 || o.steps < 2 || o.demoSteps < 2:
		return errors.New("at least 1 pair and 2 steps are needed")
	}
	for _, path := range []*string{&o.a, &o.b} {
		abs, err := filepath.Abs(*path) // the runs have separate folders
		if err != nil {
			return err
		}
		*path = abs
	}
	if _, err := os.Stat(filepath.Join(o.model, "config.json")); err == nil {
		if o.model, err = filepath.Abs(o.model); err != nil {
			return err
		}
	}
	data := filepath.Join(dir, "text.txt")
	if err := os.WriteFile(data, text(1<<20), 0o644); err != nil {
		return err
	}
	var pairs [][2]figures
	for k := range o.pairs {
		var pair [2]figures
		for turn := range 2 {
			side := (turn + k) % 2
			if pair[side], err = once([]string{o.a, o.b}[side], dir, data, o); err != nil {
				return err
			}
		}
		pairs = append(pairs, pair)
		fmt.Printf("pair %d of %d: step %.3f and %.3f s, demo %.4f and %.4f s a step\n", k+1, o.pairs, pair[0]["step"], pair[1]["step"], pair[0]["demo"], pair[1]["demo"])
	}
	rows := table(pairs)
	return errors.Join(show(rows), bench.WriteJSON(o.jsonPath, rows))
}

// text returns n bytes of data, the same on every machine.
func text(n int) []byte {
	var b bytes.Buffer
	for i := 0; b.Len() < n; i++ {
		fmt.Fprintf(&b, "%d squared is %d. ", i, i*i)
	}
	return b.Bytes()[:n]
}

// once runs a build's step and demo.
func once(binary, dir, data string, o options) (figures, error) {
	f := figures{}
	metrics, trace := filepath.Join(dir, "metrics.jsonl"), filepath.Join(dir, "trace.json")
	cpu, err := command(binary, "train", "--model", o.model, "--data", data, "--ranks", "1", "--batch", strconv.Itoa(o.batch), "--seq", strconv.Itoa(o.seq),
		"--steps", strconv.Itoa(o.steps), "--metrics", metrics, "--trace", trace)
	if err != nil {
		return nil, err
	}
	if f["step"], err = stepSeconds(metrics); err != nil {
		return nil, err
	}
	f["step, processor time of the run"] = cpu
	if err := kernels(trace, f); err != nil {
		return nil, err
	}
	if cpu, err = command(binary, "train", "--steps", strconv.Itoa(o.demoSteps), "--metrics", metrics); err != nil {
		return nil, err
	}
	if f["demo"], err = stepSeconds(metrics); err != nil {
		return nil, err
	}
	f["demo, processor time of the run"] = cpu
	return f, nil
}

// command runs a build and returns the processor time that it used, in seconds. It first removes
// the previous run's metrics and trace.
func command(binary string, args ...string) (float64, error) {
	for i, arg := range args {
		if arg == "--metrics" || arg == "--trace" {
			if err := os.Remove(args[i+1]); err != nil && !errors.Is(err, os.ErrNotExist) {
				return 0, err
			}
		}
	}
	// The demo writes checkpoints in its folder, so each run has a new one.
	dir, err := os.MkdirTemp("", "run")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	_, processor, err := bench.Run(dir, append([]string{binary}, args...)...)
	return processor, err
}

// stepSeconds returns the median time of the steps in a metrics file, without the first.
func stepSeconds(path string) (float64, error) {
	file, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer file.Close()
	var list []float64
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		var line struct {
			Step    int
			Loss    *float64
			Seconds float64
		}
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			return 0, fmt.Errorf("%s: %w", path, err)
		}
		if line.Loss != nil && line.Step > 1 && line.Seconds > 0 {
			list = append(list, line.Seconds)
		}
	}
	if err := lines.Err(); err != nil {
		return 0, err
	}
	if len(list) == 0 {
		return 0, fmt.Errorf("%s: no step behind the first", path)
	}
	return bench.Median(list), nil
}

// kernels sums section "step" of a trace by kind of operation. Kinds with under a thousandth of the
// time are left out.
func kernels(path string, into figures) error {
	spans, err := bench.ReadTrace(path)
	if err != nil {
		return err
	}
	sums, all := figures{}, 0.0
	for _, e := range spans {
		sums[e.Kind] += (e.End - e.Start) / 1e6
		all += (e.End - e.Start) / 1e6
	}
	for kind, s := range sums {
		if s > all/1000 {
			into["kernel "+kind] = s
		}
	}
	return nil
}

// table returns rows with the figures that all runs have.
func table(pairs [][2]figures) (rows []row) {
	for what := range pairs[0][0] {
		r := row{What: what}
		var ratios []float64
		for _, p := range pairs {
			a, okA := p[0][what]
			b, okB := p[1][what]
			if okA && okB {
				r.Pairs, ratios = append(r.Pairs, [2]float64{a, b}), append(ratios, b/a)
			}
		}
		if len(ratios) == len(pairs) {
			r.Ratio, r.Lowest, r.Most = bench.Median(ratios), slices.Min(ratios), slices.Max(ratios)
			rows = append(rows, r)
		}
	}
	kernel := func(r row) int {
		if strings.HasPrefix(r.What, "kernel ") {
			return 1
		}
		return 0
	}
	slices.SortFunc(rows, func(x, y row) int {
		return cmp.Or(cmp.Compare(kernel(x), kernel(y)), cmp.Compare(y.Pairs[0][0], x.Pairs[0][0]), cmp.Compare(x.What, y.What))
	})
	return rows
}

func show(rows []row) error {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "\ta\tb\tb/a\tfrom\tto\t")
	for _, r := range rows {
		var a, b []float64
		for _, p := range r.Pairs {
			a, b = append(a, p[0]), append(b, p[1])
		}
		fmt.Fprintf(w, "%s\t%.4f s\t%.4f s\t%.3f\t%.3f\t%.3f\t\n", r.What, bench.Median(a), bench.Median(b), r.Ratio, r.Lowest, r.Most)
	}
	return w.Flush()
}
