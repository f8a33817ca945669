// Package precision rewrites a program of f32 values into one that computes in
// 16 bits.
//
//	                  f32            bf16, f16
//	parameters        f32            16 bits, resident; an f32 master in the shard
//	activations       f32            16 bits
//	gradients         f32            16 bits, stored and sent; f32 with Reduce32
//	statistics, loss  f32, f64       the same
//	moments           f32            f32
//
// The sharding rewrite adds the master weights, and the accumulators of gradients over
// micro-batches, because they are sharded.
package precision

import (
	"fmt"
	"strings"

	"github.com/spillway-ml/spillway/graph"
)

// Precision is the type in which a model computes.
type Precision int

// Precisions.
const (
	FP32 Precision = iota
	BF16           // bfloat16 (Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019)
	FP16           // IEEE binary16 with dynamic loss scaling (Micikevicius et al., Mixed Precision Training, ICLR 2018)
)

var names = [...]string{"fp32", "bf16", "fp16"}

func (p Precision) String() string {
	if p < 0 || int(p) >= len(names) {
		return fmt.Sprintf("precision(%d)", int(p))
	}
	return names[p]
}

// Parse returns the precision with the given name, or an error if there is none.
func Parse(name string) (Precision, error) {
	for i, n := range names {
		if strings.EqualFold(name, n) {
			return Precision(i), nil
		}
	}
	return FP32, fmt.Errorf("precision: %.80q is not known; use one of %s", name, strings.Join(names[:], ", "))
}

// DType returns the type of parameters and activations.
func (p Precision) DType() graph.DType {
	return [...]graph.DType{graph.F32, graph.BF16, graph.F16}[p]
}

// Options of the rewrite.
type Options struct {
	Precision Precision
	// Grads32 makes the backward write parameters' gradients in f32. It is set if they are sent
	// in f32, or accumulate over micro-batches before they are reduced.
	Grads32 bool
}

// Cast returns the program with parameters, activations and their gradients in 16 bits, wherever
// every operation on them supports that. For FP32 it returns the program unchanged. A value that
// some operation needs in f32 and another in 16 bits (the logits of a cross-entropy, inputs that
// the host fills, logits that it reads) gets a second buffer, its twin, and casts between the two:
//
//	y = linear(x)            y = linear(x)             bf16
//	loss = cross_entropy(y)  y.f32 = cast(y)
//	                         loss = cross_entropy(y.f32)
//
// It runs after differentiation, because gradients are defined in f32, and after all sections that
// use the parameters have been added. With FP16 it adds a Scaler. Buffer.Pad must not be set yet.
func Cast(p *graph.Program, o Options) (*graph.Program, error) {
	if o.Precision < FP32 || o.Precision > FP16 {
		return nil, fmt.Errorf("precision: %v is not a precision", o.Precision)
	}
	if o.Precision == FP32 {
		return p, nil
	}
	for u := range p.Units {
		if p.Units[u].FlatLen != 0 {
			return nil, fmt.Errorf("precision: unit %.80q is laid out already; cast before sharding", p.Units[u].Name)
		}
	}
	c := &caster{p: p.Clone(), half: o.Precision.DType(), grads32: o.Grads32, twins: map[graph.BufID]graph.BufID{}}
	if err := c.classify(); err != nil {
		return nil, err
	}
	c.convert()
	for _, ph := range c.p.Phases() {
		c.phase(ph)
	}
	if o.Precision == FP16 {
		c.p.Scaler = &graph.Scaler{}
		c.p.Scaler.State = c.p.AddBuffer(graph.Buffer{Name: "loss_scale", DType: graph.F64, Shape: []int64{graph.NumScale},
			Class: graph.Optimizer, Life: graph.LifeRun, Unit: -1})
		c.p.Scaler.Overflow = overflowFlag(c.p)
	}
	return c.p, nil
}
