package main

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

const (
	steps     = 500
	evalEvery = 100
	seeds     = 3
)

// row is one way to train.
type row struct {
	name    string
	flags   []string
	control *control // nil: the program as it is
	seeds   int
}

// control is a fault that is built into a copy of the program by edits of a source file,
// so that no flag is needed that a user could give.
type control struct {
	file  string
	edits [][2]string // what is there once, and what it becomes
}

var bf16 = []string{"--precision", "bf16"}

// rows lists what is compared, the baselines before what is judged by them.
func rows() []row {
	r := []row{{name: "fp32"}, {name: "bf16", flags: bf16}, {name: "fp16", flags: []string{"--precision", "fp16"}}}
	all := []string{"optimizer", "gather", "reduce", "activations", "matmul"}
	for _, s := range all {
		r = append(r, row{name: s, flags: append(bf16, "--int8", s)})
	}
	r = append(r, row{name: "all", flags: append(bf16, "--int8", strings.Join(all, ","))})
	for i := range r {
		r[i].seeds = seeds
	}
	return append(r,
		row{name: "linear map", flags: append(bf16, "--int8", "optimizer"), seeds: 1, control: &control{
			"kernels/cpu/vec/quant8.go", [][2]string{{"\t\tm.t.byBins(m.value[1])\n", "\t}\n" + linearMap + "\tif false {\n"}, {"uint8(max(c, 1))", "uint8(c)"}}}},
		row{name: "moments scales swapped", flags: append(bf16, "--int8", "optimizer"), seeds: 1, control: &control{
			"kernels/cpu/vec/adamw8.go", [][2]string{{"= float32(k.MScale[block]*a.beta1), float32(k.VScale[block]*a.beta2), 0, 0",
				"= float32(k.MScale[min(block^1, len(k.MScale)-1)]*a.beta1), float32(k.VScale[min(block^1, len(k.VScale)-1)]*a.beta2), 0, 0"}}}},
		row{name: "gather scales swapped", flags: append(bf16, "--int8", "gather"), seeds: 1, control: &control{
			"kernels/cpu/vec/int8.go", [][2]string{{"codes, scales := k.From.at(from, at, at+len(sum))\n", neighbours}}}},
		row{name: "matmul scales swapped", flags: append(bf16, "--int8", "matmul"), seeds: 1, control: &control{
			"kernels/cpu/vec/int8.go", [][2]string{
				{"k.Scales[r] = quantize8(", "k.Scales[min(r^1, k.Rows-1)] = quantize8("},
				{"k.Scales[lo+j], inverses[j] = a/127", "k.Scales[min((lo+j)^1, k.Cols-1)], inverses[j] = a/127"}}}},
		row{name: "fp16 without backoff", flags: []string{"--precision", "fp16", "--loss-scale", strconv.Itoa(1 << 30)}, seeds: 1})
}

// neighbours makes a block of quantised parameters be read with the scale of the block
// beside it.
const neighbours = `codes, _ := k.From.at(from, at, at+len(sum))
		beside := min((at/k.From.Block^1)*k.From.Block, k.From.Len-len(sum))
		_, scales := k.From.at(from, beside, beside+len(sum))
`

// linearMap makes the codes of 8-bit moments equal steps from 0 to 1, and lets small
// second moments become 0.
const linearMap = `	top := float32(int(1)<<bits - 1)
	for j := range m.t.border {
		m.t.border[j], m.t.perUnit[j], m.t.from[j], m.t.last[j] = float32(math.Inf(1)), top, 0.5, int32(top)
	}
	for k := range m.t.slope {
		m.t.slope[k], m.t.start[k] = 1/top, -1/top
		m.t.borders[k], m.t.gains[k], m.t.offsets[k], m.t.lasts[k] = float32(math.Inf(1)), top, 0.5, int32(top)
	}
	for c := range m.value {
		m.value[c] = m.t.magnitude(c & (1<<bits - 1))
		if c >= 1<<bits {
			m.value[c] = -m.value[c]
		}
	}
	m.t.byBins(0x1p-29)
`

// fileName makes a row's name one of files.
var fileName = strings.NewReplacer(" ", "-", "'", "", "^", "")

// measure runs what -runs lacks and reads all of it.
func measure(o options) (l ledger, err error) {
	l.Steps = steps
	if err := os.MkdirAll(o.runs, 0o755); err != nil {
		return l, err
	}
	if o.data == "" || o.eval == "" {
		root, err := exec.Command("go", "env", "GOROOT").Output()
		if err != nil {
			return l, fmt.Errorf("go env GOROOT, where -data and -eval-data are: %w", err)
		}
		at := strings.TrimSpace(string(root))
		o.data, o.eval = cmp.Or(o.data, filepath.Join(at, "src")), cmp.Or(o.eval, filepath.Join(at, "test"))
	}
	only := strings.Split(o.only, ",")
	for _, r := range rows() {
		if o.only != "" && !slices.Contains(only, r.name) {
			continue
		}
		for seed := 1; seed <= r.seeds; seed++ {
			name := filepath.Join(o.runs, fmt.Sprintf("%s-%d", fileName.Replace(r.name), seed))
			if _, err := os.Stat(name + ".done"); err != nil && o.spillway == "" {
				continue
			}
			c := curve{Row: r.name, Seed: seed}
			if c.Ended, err = finished(o, r, seed, name); err != nil {
				return l, err
			}
			if err := c.read(name + ".jsonl"); err != nil {
				return l, err
			}
			l.Runs = append(l.Runs, c)
		}
	}
	return l, nil
}

// finished runs a row unless its .done is there, and returns what ended it early, which
// is only taken of steps that are not finite: a lost rank says nothing of the numbers.
func finished(o options, r row, seed int, name string) (ended string, err error) {
	if b, err := os.ReadFile(name + ".done"); err == nil {
		ended, _ = strings.CutPrefix(strings.TrimSpace(string(b)), "ok")
		return strings.TrimSpace(ended), nil
	}
	command := o.spillway
	if r.control != nil {
		command = name + ".spillway"
		if err := build(command, *r.control); err != nil {
			return "", fmt.Errorf("%s: %w", r.name, err)
		}
		defer func() { _ = os.Remove(command) }()
	}
	if err := os.Remove(name + ".jsonl"); err != nil && !os.IsNotExist(err) {
		return "", err
	}
	args := append([]string{"train", "--model", "spillway-ledger", "--data", o.data, "--data-glob", "*.go", "--order", "shuffled",
		"--ranks", "2", "--zero", "3", "--batch", "2", "--accum", "2", "--seq", "128", "--steps", strconv.Itoa(steps),
		"--lr", "1e-3", "--lr-schedule", "cosine", "--warmup", "20", "--clip", "1", "--seed", strconv.Itoa(seed),
		"--eval-data", o.eval, "--eval-every", strconv.Itoa(evalEvery), "--eval-steps", "16", "--metrics", name + ".jsonl"}, r.flags...)
	fmt.Fprintln(os.Stderr, filepath.Base(name), "…")
	var out bytes.Buffer
	k := exec.Command(command, args...)
	k.Stdout, k.Stderr = &out, &out
	runErr := k.Run()
	if err := os.WriteFile(name+".out", out.Bytes(), 0o644); err != nil {
		return "", err
	}
	if runErr != nil {
		lines := strings.Split(strings.TrimSpace(out.String()), "\n")
		ended = lines[len(lines)-1]
		if k.ProcessState == nil || k.ProcessState.ExitCode() != 3 || !strings.Contains(ended, " is not finite") {
			return "", fmt.Errorf("%s, seed %d: %w: see %s.out", r.name, seed, runErr, name)
		}
	}
	return ended, os.WriteFile(name+".done", []byte(strings.TrimSpace("ok "+ended)+"\n"), 0o644)
}

// build makes the program with an edit of one source file, which stays as it is.
func build(command string, c control) error {
	command, err := filepath.Abs(command)
	if err != nil {
		return err
	}
	source, err := filepath.Abs(c.file)
	if err != nil {
		return err
	}
	edited, err := c.edited()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "ledger-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	other, overlay := filepath.Join(dir, "edited.go"), filepath.Join(dir, "overlay.json")
	b, err := json.Marshal(map[string]map[string]string{"Replace": {source: other}})
	if err != nil {
		return err
	}
	if err := os.WriteFile(other, edited, 0o644); err != nil {
		return err
	}
	if err := os.WriteFile(overlay, b, 0o644); err != nil {
		return err
	}
	if out, err := exec.Command("go", "build", "-overlay", overlay, "-o", command, "./cmd/spillway").CombinedOutput(); err != nil {
		return fmt.Errorf("building it (run the ledger from the repository's root): %w\n%s", err, out)
	}
	return nil
}

// edited is the control's file with its edit.
func (c control) edited() ([]byte, error) {
	b, err := os.ReadFile(c.file)
	if err != nil {
		return nil, err
	}
	for _, e := range c.edits {
		if n := bytes.Count(b, []byte(e[0])); n != 1 {
			return nil, fmt.Errorf("%s has %q %d times, want it once: the control is to be written anew", c.file, e[0], n)
		}
		b = bytes.Replace(b, []byte(e[0]), []byte(e[1]), 1)
	}
	return b, nil
}

// read takes the losses of a metrics file.
func (c *curve) read(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	c.Train, c.Held = []float64{}, []float64{}
	for s := bufio.NewScanner(f); ; {
		if !s.Scan() {
			if s.Err() != nil {
				return fmt.Errorf("%s: %w", file, s.Err())
			}
			break
		}
		var line struct {
			Event   string
			Step    int
			Loss    *float64
			Skipped bool
		}
		if err := json.Unmarshal(s.Bytes(), &line); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		switch {
		case line.Loss == nil:
		case line.Event == "eval":
			c.Held = append(c.Held, rounded(*line.Loss))
		case line.Event == "":
			c.Train = append(c.Train, rounded(*line.Loss))
		}
	}
	if c.Ended == "" && (len(c.Train) != steps || len(c.Held) != steps/evalEvery) {
		return fmt.Errorf("%s: %d steps and %d evaluations, want %d and %d", file, len(c.Train), len(c.Held), steps, steps/evalEvery)
	}
	return nil
}

// rounded keeps the five decimals that the ledger's file holds.
func rounded(v float64) float64 { return math.Round(v*1e5) / 1e5 }
