// Package published holds throughputs published by other projects and compares them with this
// project's predictions for the same jobs. The ratios show how accurate a predicted time on a GPU
// is.
package published

import (
	_ "embed"
	"encoding/csv"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// Row is a published run: a job in this project's terms and its speed. Source says where each
// value was read.
type Row struct {
	Calibration bool   // used to compute ranges and calibrations; otherwise held out, to test them
	Stack       string // the software: one of Stacks
	Project     string // the project that published it
	Card        string // a name that gpus.Lookup accepts
	// Model is a preset, the nearest one if the project trained another model; or
	// gpt2:LAYERS:WIDTH:HEADS:VOCABULARY, or
	// llama:LAYERS:WIDTH:HEADS:KV HEADS:FFN WIDTH:VOCABULARY.
	Model            string
	Ranks, Node      int // GPUs, and GPUs per server
	Shard            int // GPUs that share a copy of the states; 0: all
	Tensor, Pipeline int // ranks of a tensor-parallel group and stages of a pipeline; 0: 1
	Seq, Batch       int
	Accum, Zero      int
	Recompute        string
	Offload          string
	Reduce           string
	Network          float64 // a GPU's share of the network in Gbit/s; 0: the card's preset
	TokensPerS       float64 // tokens per second and GPU
	Device           float64 // peak bytes in use on a GPU; 0: not published
	Host             float64 // bytes of a server's host memory in use; 0: not published
	Source           string
	Here             Prediction
}

// Prediction is this project's prediction for the same job in bf16 (made by benchmarks/published):
// tokens per second and GPU, bytes counted as in the published run, and the parts of the time.
type Prediction struct {
	TokensPerS, Device, Host float64
	Parts
}

// Parts are the shares of a predicted step's time in matrix products, attention and other
// computation; the rest is waiting.
type Parts struct{ Products, Attention, Other float64 }

// PartsOf returns the parts of a step that takes seconds. exposed is how long the compute stream
// waits.
func PartsOf(seconds, exposed, products, attention float64) Parts {
	return Parts{Products: products / seconds, Attention: attention / seconds, Other: (seconds - exposed - products - attention) / seconds}
}

func (p Prediction) String() string {
	return fmt.Sprintf("%.4g %.0f %.0f %.4f %.4f %.4f", p.TokensPerS, p.Device, p.Host, p.Products, p.Attention, p.Other)
}

// Ratio returns the published time divided by the predicted time. Above 1, the prediction is too
// fast for the stack.
func (r *Row) Ratio() float64 { return r.Here.TokensPerS / r.TokensPerS }

//go:embed rows.csv
var rowsCSV string

//go:embed predicted.csv
var predictedCSV string

// Columns lists the columns of rows.csv, in order.
var Columns = []string{
	"role", "stack", "project", "card", "model", "ranks", "gpus_per_node", "shard_size", "tensor", "pipeline", "seq", "batch", "accum", "zero",
	"recompute", "offload", "reduce", "network_gbit", "tokens_per_s_per_gpu", "device_bytes", "host_bytes_per_server", "source",
}

// Rows returns all published runs, in the order of the files. The caller must not change them.
var Rows = sync.OnceValue(func() []Row {
	records, err := csv.NewReader(strings.NewReader(rowsCSV)).ReadAll()
	if err != nil {
		return nil // the files are embedded: a test checks that they parse
	}
	rows, err := Parse(records, predictedCSV)
	if err != nil {
		return nil
	}
	return rows
})

// Parse reads the records of rows.csv, including the heading, and the predictions: one Prediction
// per line, in the same order.
func Parse(records [][]string, predicted string) (list []Row, err error) {
	if len(records) == 0 || !slices.Equal(records[0], Columns) {
		return nil, fmt.Errorf("published: the columns have to be %s", strings.Join(Columns, ", "))
	}
	lines := strings.Split(strings.TrimSpace(predicted), "\n")
	if len(lines) != len(records)-1 {
		return nil, fmt.Errorf("published: %d rows and %d predictions; benchmarks/published makes them anew", len(records)-1, len(lines))
	}
	for i, rec := range records[1:] {
		r, err := parseRow(rec)
		if err != nil {
			return nil, fmt.Errorf("published: line %d: %w", i+2, err)
		}
		h := &r.Here
		n, err := fmt.Sscan(lines[i], &h.TokensPerS, &h.Device, &h.Host, &h.Products, &h.Attention, &h.Other)
		if err != nil || n != 6 || !(h.TokensPerS > 0) {
			return nil, fmt.Errorf("published: prediction %d is %q", i+1, lines[i])
		}
		list = append(list, r)
	}
	return list, nil
}

func parseRow(rec []string) (r Row, err error) {
	of := map[string]string{}
	for c, name := range Columns {
		of[name] = rec[c]
	}
	r = Row{
		Calibration: of["role"] == "calibration", Stack: of["stack"], Project: of["project"], Card: of["card"], Model: of["model"],
		Recompute: of["recompute"], Offload: of["offload"], Reduce: of["reduce"], Source: of["source"],
	}
	if !r.Calibration && of["role"] != "held-out" {
		return r, fmt.Errorf("the role %q is neither calibration nor held-out", of["role"])
	}
	for name, to := range map[string]*int{
		"ranks": &r.Ranks, "gpus_per_node": &r.Node, "shard_size": &r.Shard, "tensor": &r.Tensor, "pipeline": &r.Pipeline,
		"seq": &r.Seq, "batch": &r.Batch, "accum": &r.Accum, "zero": &r.Zero,
	} {
		if of[name] == "" && (name == "shard_size" || name == "tensor" || name == "pipeline") {
			continue
		}
		if *to, err = strconv.Atoi(of[name]); err != nil {
			return r, fmt.Errorf("%s %q is not a number", name, of[name])
		}
	}
	if r.TokensPerS, err = strconv.ParseFloat(of["tokens_per_s_per_gpu"], 64); err != nil || !(r.TokensPerS > 0) {
		return r, fmt.Errorf("%q tokens a second", of["tokens_per_s_per_gpu"])
	}
	for name, to := range map[string]*float64{"network_gbit": &r.Network, "device_bytes": &r.Device, "host_bytes_per_server": &r.Host} {
		if of[name] == "" {
			continue
		}
		if *to, err = strconv.ParseFloat(of[name], 64); err != nil || !(*to > 0) {
			return r, fmt.Errorf("%s %q is not a positive number", name, of[name])
		}
	}
	return r, nil
}

// Memory is the range, over N runs, of published memory use divided by this project's planned
// memory for the same job. N is 0 if no run is known.
type Memory struct {
	Low, High float64
	N         int
}

// Text formats the range: one number if its ends differ by less than 0.01.
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

// DeviceMemory returns the range for the memory of a GPU, over the runs of the given stacks.
func DeviceMemory(stacks ...string) Memory {
	return memory(stacks, func(r *Row) (there, here float64) { return r.Device, r.Here.Device })
}

// HostMemory returns the range for the host memory of a server.
func HostMemory(stacks ...string) Memory {
	return memory(stacks, func(r *Row) (there, here float64) { return r.Host, r.Here.Host })
}

func memory(stacks []string, of func(*Row) (there, here float64)) (m Memory) {
	rows := Rows()
	for i := range rows {
		there, here := of(&rows[i])
		if !slices.Contains(stacks, rows[i].Stack) || there == 0 {
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

// Stack names, as users write them.
const (
	Torch     = "torch"         // PyTorch FSDP, eager
	Compiled  = "torch-compile" // PyTorch FSDP with torch.compile
	DeepSpeed = "deepspeed"     // DeepSpeed and DDP
	Megatron  = "megatron"      // Megatron-LM and NeMo
	MaxText   = "maxtext"       // MaxText and Pax: JAX on GPUs
	InternEvo = "internevo"
	LLMQ      = "llmq"
)

// Stacks lists the stacks that have rows.
var Stacks = []string{Torch, Compiled, DeepSpeed, Megatron, MaxText, InternEvo, LLMQ}
