// Package published has throughputs that other projects have published, and compares them with
// this project's predictions for the same jobs. The ratio says how far a predicted time on a
// GPU can be trusted.
package published

import (
	_ "embed"
	"encoding/csv"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// Row is a published run: a job in this project's terms and its speed. Source says where each
// value was read.
type Row struct {
	Calibration bool   // used to compute the ranges; otherwise held out, to test them
	Stack       string // the software
	Project     string // the project that published it
	Card        string // as gpus.Lookup takes it
	Model       string // preset; the nearest one if the project trained another model
	Ranks, Node int    // GPUs, and GPUs per server
	Shard       int    // GPUs that share a copy of the states; 0: all
	Seq, Batch  int
	Accum, Zero int
	Recompute   string
	Offload     string
	Reduce      string
	TokensPerS  float64 // tokens per second and GPU
	Device      float64 // peak bytes in use on a GPU; 0: not published
	Host        float64 // bytes of a server's host memory in use; 0: not published
	Source      string
	Here        Prediction
}

// Prediction is this project's prediction for the same job in bf16 (made by
// benchmarks/published): tokens per second and GPU, and bytes counted as in the published run.
type Prediction struct{ TokensPerS, Device, Host float64 }

func (p Prediction) String() string {
	return fmt.Sprintf("%.4g %.0f %.0f", p.TokensPerS, p.Device, p.Host)
}

// Ratio is the published time over the predicted one: above 1, the prediction
// is too fast for the stack.
func (r *Row) Ratio() float64 { return r.Here.TokensPerS / r.TokensPerS }

//go:embed rows.csv
var rowsCSV string

//go:embed predicted.csv
var predictedCSV string

var columns = []string{"role", "stack", "project", "card", "model", "ranks", "gpus_per_node", "shard_size", "seq", "batch", "accum", "zero", "recompute", "offload", "reduce", "tokens_per_s_per_gpu", "device_bytes", "host_bytes_per_server", "source"}

// Rows returns all published runs, in the order of the files. The caller must not change them.
var Rows = sync.OnceValue(func() []Row {
	records, err := csv.NewReader(strings.NewReader(rowsCSV)).ReadAll()
	if err != nil {
		return nil // the files are part of the program: a test reads them
	}
	rows, err := Parse(records, predictedCSV)
	if err != nil {
		return nil
	}
	return rows
})

// Parse reads the records of rows.csv, heading included, and the predictions, one Prediction a
// line in the same order.
func Parse(records [][]string, predicted string) (list []Row, err error) {
	if len(records) == 0 || !slices.Equal(records[0], columns) {
		return nil, fmt.Errorf("published: the columns have to be %s", strings.Join(columns, ", "))
	}
	lines := strings.Split(strings.TrimSpace(predicted), "\n")
	if len(lines) != len(records)-1 {
		return nil, fmt.Errorf("published: %d rows and %d predictions; benchmarks/published makes them anew", len(records)-1, len(lines))
	}
	for i, rec := range records[1:] {
		r := Row{Calibration: rec[0] == "calibration", Stack: rec[1], Project: rec[2], Card: rec[3], Model: rec[4], Recompute: rec[12], Offload: rec[13], Reduce: rec[14], Source: rec[18]}
		if !r.Calibration && rec[0] != "held-out" {
			return nil, fmt.Errorf("published: line %d: the role %q is neither calibration nor held-out", i+2, rec[0])
		}
		for c, to := range map[int]*int{5: &r.Ranks, 6: &r.Node, 7: &r.Shard, 8: &r.Seq, 9: &r.Batch, 10: &r.Accum, 11: &r.Zero} {
			if rec[c] == "" && c == 7 {
				continue
			}
			if *to, err = strconv.Atoi(rec[c]); err != nil {
				return nil, fmt.Errorf("published: line %d: %s %q is not a number", i+2, columns[c], rec[c])
			}
		}
		if r.TokensPerS, err = strconv.ParseFloat(rec[15], 64); err != nil || !(r.TokensPerS > 0) {
			return nil, fmt.Errorf("published: line %d: %q tokens a second", i+2, rec[15])
		}
		for c, to := range map[int]*float64{16: &r.Device, 17: &r.Host} {
			if rec[c] == "" {
				continue
			}
			if *to, err = strconv.ParseFloat(rec[c], 64); err != nil || !(*to > 0) {
				return nil, fmt.Errorf("published: line %d: %s %q is not a size", i+2, columns[c], rec[c])
			}
		}
		if n, err := fmt.Sscan(lines[i], &r.Here.TokensPerS, &r.Here.Device, &r.Here.Host); err != nil || n != 3 || !(r.Here.TokensPerS > 0) {
			return nil, fmt.Errorf("published: prediction %d is %q", i+1, lines[i])
		}
		list = append(list, r)
	}
	return list, nil
}

// Range is the range of published over predicted times: published runs took Low to High times
// as long as this project predicts.
type Range struct {
	Low, High float64
	Rows      int      // the number of rows behind the range
	Stacks    []string // software of those rows, in name order
	// Elsewhere says that no row is of the card or its generation; the range is then over all
	// cards.
	Elsewhere bool
}

// Text is the range in words, with the runs that it comes from.
func (r Range) Text() string {
	on := "published runs"
	if r.Elsewhere {
		on = "no published run of this generation is known; published runs on others"
	}
	return fmt.Sprintf("%s (%d, of %s) took %.2f to %.2f times as long as predicted", on, r.Rows, strings.Join(r.Stacks, ", "), r.Low, r.High)
}

// RangeOf returns a card's range, from the smallest to the largest ratio of its calibration
// rows, rounded outwards to two digits. A card without rows gets those of its generation.
func RangeOf(card string, generation func(card string) string) Range {
	return RangeIn(Rows(), card, generation)
}

// RangeIn is RangeOf for the given rows.
func RangeIn(rows []Row, card string, generation func(card string) string) Range {
	same := func(r *Row) bool { return r.Card == card }
	akin := func(r *Row) bool { return generation(r.Card) == generation(card) }
	all := func(*Row) bool { return true }
	for i, of := range []func(*Row) bool{same, akin, all} {
		out := Range{Elsewhere: i == 2, Low: math.Inf(1)}
		for k := range rows {
			r := &rows[k]
			if !r.Calibration || !of(r) {
				continue
			}
			out.Rows++
			out.Low, out.High = min(out.Low, r.Ratio()), max(out.High, r.Ratio())
			if !slices.Contains(out.Stacks, r.Stack) {
				out.Stacks = append(out.Stacks, r.Stack)
			}
		}
		if out.Rows == 0 {
			continue
		}
		out.Low, out.High = math.Floor(100*out.Low)/100, math.Ceil(100*out.High)/100
		slices.Sort(out.Stacks)
		return out
	}
	return Range{Low: 1, High: 1}
}

// Memory is the ratio of a stack's published memory use to this project's plan for the same
// job, smallest to largest, over n runs; n is 0 if none is known.
type Memory struct {
	Low, High float64
	N         int
}

// Text formats the ratio: one number if both ends are equal.
func (m Memory) Text() string {
	runs := "runs"
	if m.N == 1 {
		runs = "run"
	}
	if m.High-m.Low < 0.01 {
		return fmt.Sprintf("%.2f times as much in %d published %s", m.Low, m.N, runs)
	}
	return fmt.Sprintf("%.2f to %.2f times as much in %d published %s", m.Low, m.High, m.N, runs)
}

// DeviceMemory is the ratio for a GPU's memory, HostMemory that for a server's.
func DeviceMemory(stack string) Memory {
	return memory(stack, func(r *Row) (there, here float64) { return r.Device, r.Here.Device })
}

// HostMemory: see DeviceMemory.
func HostMemory(stack string) Memory {
	return memory(stack, func(r *Row) (there, here float64) { return r.Host, r.Here.Host })
}

func memory(stack string, of func(*Row) (there, here float64)) (m Memory) {
	rows := Rows()
	for i := range rows {
		there, here := of(&rows[i])
		if rows[i].Stack != stack || there == 0 {
			continue
		}
		ratio := there / here
		if m.N == 0 {
			m.Low, m.High = ratio, ratio
		}
		m.N++
		m.Low, m.High = min(m.Low, ratio), max(m.High, ratio)
	}
	return m
}

// Names of the stacks.
const (
	FSDP      = "PyTorch FSDP"
	DeepSpeed = "DeepSpeed and DDP"
)
