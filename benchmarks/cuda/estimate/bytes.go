package main

import (
	"encoding/binary"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
)

// productBytes returns the bytes that a product reads and writes at least once.
func productBytes(p blas.Product) float64 {
	m, n, k := float64(p.M), float64(p.N), float64(p.K)
	times := 1.0
	if p.Accumulate {
		times = 2
	}
	return m*k*float64(p.A.Type.Size()) + k*n*float64(p.B.Type.Size()) + times*m*n*float64(p.C.Type.Size())
}

// Packed parameters follow the predicate's 8 bytes in the order of the kernel's source.

// number reads a parameter of 8 bytes, small one of 4.
func (l *launch) number(at int) float64 {
	return float64(int64(binary.LittleEndian.Uint64(l.params[at:])))
}
func (l *launch) small(at int) float64 {
	return float64(int32(binary.LittleEndian.Uint32(l.params[at:])))
}

// spans returns the sum of the elements of struct Spans.
func (l *launch) spans(at int) (n float64) {
	for i := range int(l.number(at)) {
		n += l.number(at+8+8*(16+i)) - l.number(at+8+8*i)
	}
	return n
}

var sizes = map[string]float64{"f32": 4, "bf16": 2, "f16": 2}

// coded returns the size of a type by its number in update.cu.
func coded(t float64) float64 {
	if t == 0 {
		return 4
	}
	return 2
}

var typed = regexp.MustCompile(`^(.*?)((?:_(?:f32|bf16|f16))*)$`)

// bytes returns the bytes that a launch reads and writes in memory, computed from its parameters.
// Repeated reads count if the card's cache does not hold the data. A launch that follows another
// counts all of its own bytes.
func (l *launch) bytes() (float64, error) {
	if l.function == driversOwn {
		return l.moved, nil
	}
	m := typed.FindStringSubmatch(l.name)
	var t [2]float64 // sizes of the types in the name: of operands, of the result
	for i, s := range strings.Split(strings.TrimPrefix(m[2], "_"), "_") {
		if i < 2 {
			t[i] = sizes[s]
		}
	}
	if t[1] == 0 {
		t[1] = t[0]
	}
	rows := float64(l.grid.X)
	switch name := m[1]; {
	case strings.HasPrefix(name, "fill_"): // y, n
		size, err := strconv.ParseFloat(strings.TrimPrefix(name, "fill_"), 64)
		return size * l.number(16), err
	case strings.HasPrefix(name, "act_grad_"): // dy, pre, dx, n, accumulate
		return (3 + l.small(40)) * t[0] * l.number(32), nil
	case strings.HasPrefix(name, "act_"): // x, y, n
		return 2 * t[0] * l.number(24), nil
	case name == "add_bias": // bias, y, rows, cols
		return 2 * t[0] * l.number(24) * l.number(32), nil
	case name == "cast": // x, y, n, accumulate
		return (t[0] + (1+l.small(32))*t[1]) * l.number(24), nil
	case name == "column_parts": // part, parts, cols
		return (4*l.number(16) + t[0]) * l.number(24), nil
	case name == "columns": // x, rows, cols, part_rows
		return (t[0]*l.number(16) + t[1]*l.number(16)/l.number(32)) * l.number(24), nil
	case name == "embed": // tokens, table, y, rows, vocab, cols
		return 2 * t[0] * l.number(32) * l.number(48), nil
	case name == "embed_grad": // tokens, dy, dtable, n, vocab, cols, accumulate
		n, vocab := l.number(32), l.number(40)
		table := vocab
		if l.small(56) != 0 { // the complete table is read; rows with a token are written
			table += min(n, vocab)
		}
		return (t[0]*n + t[1]*table) * l.number(48), nil
	case name == "add_pos": // x, pos, y, rows, cols, seq
		return t[0] * (2*l.number(32) + l.number(48)) * l.number(40), nil
	case name == "add_pos_grad": // dy, dpos, rows, cols, seq, positions, accumulate
		return (t[0]*l.number(24) + t[1]*(1+l.small(56))*l.number(40)) * l.number(32), nil
	case name == "head": // logits in fp32, more than the cache holds, twice, and gradients; v
		return rows * l.number(16) * (2*4 + t[0]), nil
	case name == "loss_sum": // losses in fp64, n
		return 8 * l.number(16), nil
	case name == "layernorm": // x, gamma, beta, y, mean, rstd, cols
		return rows * (2*t[0]*l.small(56) + 8), nil
	case name == "add_layernorm": // a, b, sum, gamma, beta, y, mean, rstd, cols
		return rows * (4*t[0]*l.small(72) + 8), nil
	case name == "norm_grad": // dy, x, gamma, mean, rstd, dx, gains, shifts, rows, cols, accumulate; a lane a block
		n, c := l.number(72), l.small(80)
		return n*((3+l.small(84))*t[0]*c+8) + 2*4*rows*c, nil
	case name == "norm_lanes": // gains, shifts, dgamma, dbeta, cols
		return 2 * (4*float64(graph.CUDATarget().CUDA.NormLanes) + t[0]) * l.number(40), nil
	case name == "sqsum": // x, accumulators, spans, type
		return l.spans(24) * coded(l.small(672)), nil
	case name == "clip_coef":
		return 8 * 72, nil
	case name == "adamw": // g, coef, hyper, p, m, v, low, spans, …, type of g, of low
		each := coded(l.small(736)) + 2*3*4
		if l.number(56) != 0 {
			each += coded(l.small(740))
		}
		return l.spans(64) * each, nil
	}
	return l.attention(m[1], t[0])
}

// attention is bytes for the kernels of attention. Keys and values in the forward, and queries,
// gradients and sums in the backward, are read again from the cache; benchmarks/cuda/attention
// computes how much is not.
func (l *launch) attention(name string, size float64) (float64, error) {
	shape := map[string]int{ // offset of batch, seq, heads and group
		"flash_forward": 68, "flash_delta": 44, "flash_backward": 136,
		"attention": 64, "attention_delta": 32, "attention_dq": 88, "attention_dkv": 96,
	}
	at, ok := shape[name]
	if !ok {
		return 0, fmt.Errorf("the estimate does not know how many bytes kernel %s of %s moves", l.name, l.source)
	}
	batch, seq, heads, group := l.small(at), l.small(at+4), l.small(at+8), l.small(at+12)
	dim := l.small(at + 16)
	if strings.HasPrefix(name, "flash_") {
		d, err := strconv.Atoi(strings.TrimSuffix(strings.TrimPrefix(l.source, "flash_"), ".cu"))
		if err != nil {
			return 0, err
		}
		dim = float64(d)
	}
	tokens := batch * seq
	q, kv, row := size*tokens*heads*dim, size*tokens*heads/group*dim, 4*tokens*heads
	switch name {
	case "flash_forward", "attention": // q, k, v, y, lse
		return 2*q + 2*kv + row, nil
	case "flash_delta", "attention_delta": // y, dy, delta
		return 2*q + row, nil
	case "attention_dq": // q, k, v, dy, lse, delta, dq
		return 3*q + 2*kv + 2*row, nil
	case "attention_dkv": // q, k, v, dy, lse, delta, dk, dv
		return 2*q + 4*kv + 2*row, nil
	}
	return 3*q + 4*kv + 2*row, nil // flash_backward: q, k, v, dy, lse, delta, dq, dk, dv
}
