package graph

import (
	"fmt"
	"math"
)

// Elementwise operations, softmax, rotary positions, dropout, reductions.

const (
	expFlops = 8  // a transcendental function
	actFlops = 12 // an activation or its derivative
)

var elementKinds = []*Info{
	{
		Kind:       Activation,
		Cheap:      true,
		Doc:        "y = act(x), elementwise: gelu_tanh, gelu (exact, Hendrycks & Gimpel 2016), silu or relu; same shapes.",
		Derivative: "dx = dy·act'(x); relu'(0) is 0",
		In:         []Operand{in("x", "(…)")},
		Out:        []Operand{out("y", "(…)")},
		Attr:       ActAttr{},
		Saves:      []string{"x"},
		check: func(c *checker) {
			c.same(c.out(0), c.in(0))
			c.activation(c.op.Attr.(ActAttr).Act, false)
		},
		flops: func(c *checker) int64 { return actFlops * c.out(0).elems() },
	},
	{
		Kind: ActivationGrad,
		Doc:  "dx = dy·act'(x), elementwise; dx may be in place of dy; same shapes.",
		In:   []Operand{in("dy", "(…)"), in("x", "(…)")},
		Out:  []Operand{acc("dx", "(…)").over("dy")},
		Attr: ActAttr{},
		check: func(c *checker) {
			c.same(c.in(0), c.in(1))
			c.same(c.out(0), c.in(1))
			c.activation(c.op.Attr.(ActAttr).Act, false)
		},
		flops: func(c *checker) int64 { return actFlops * c.out(0).elems() },
	},
	{
		Kind:       SoftCap,
		Cheap:      true,
		Doc:        "y = Cap·tanh(x/Cap), elementwise; same shapes; y may be in place of x.",
		Derivative: "dx = dy·(1 − (y/Cap)²)",
		In:         []Operand{in("x", "(…)")},
		Out:        []Operand{out("y", "(…)").over("x")},
		Attr:       CapAttr{},
		Saves:      []string{"y"},
		check:      func(c *checker) { c.same(c.out(0), c.in(0)); c.cap(c.op.Attr.(CapAttr).Cap, false) },
		flops:      func(c *checker) int64 { return actFlops * c.out(0).elems() },
	},
	{
		Kind:  SoftCapGrad,
		Doc:   "dx = dy·(1 − (y/Cap)²), elementwise; dx may be in place of dy; same shapes.",
		In:    []Operand{in("dy", "(…)"), in("y", "(…)")},
		Out:   []Operand{acc("dx", "(…)").over("dy")},
		Attr:  CapAttr{},
		check: func(c *checker) { sameAll(c); c.cap(c.op.Attr.(CapAttr).Cap, false) },
		flops: func(c *checker) int64 { return 4 * c.out(0).elems() },
	},
	{
		Kind:       SwiGLU,
		Cheap:      true,
		Doc:        "y = silu(gate)·up (Shazeer 2020); all (N,F).",
		Derivative: "with s = sigmoid(gate): dgate = dy·up·s·(1 + gate·(1−s)); dup = dy·silu(gate)",
		In:         []Operand{in("gate", "(N,F)"), in("up", "(N,F)")},
		Out:        []Operand{out("y", "(N,F)")},
		Saves:      []string{"gate", "up"},
		check: func(c *checker) {
			c.same(c.in(1), c.in(0))
			c.same(c.out(0), c.in(0))
		},
		flops: func(c *checker) int64 { return (actFlops + 1) * c.out(0).elems() },
	},
	{
		Kind: SwiGLUGrad,
		Doc:  "Gradients of swiglu; all (N,F).",
		In:   []Operand{in("dy", "(N,F)"), in("gate", "(N,F)"), in("up", "(N,F)")},
		Out:  []Operand{out("dgate", "(N,F)"), out("dup", "(N,F)")},
		check: func(c *checker) {
			for _, r := range []ref{c.in(0), c.in(2), c.out(0), c.out(1)} {
				c.same(r, c.in(1))
			}
		},
		flops: func(c *checker) int64 { return 2 * actFlops * c.out(0).elems() },
	},
	{
		Kind:       Softmax,
		Doc:        "y = exp(x − max)/Σ exp(x − max) over each row; x, y (N,C).",
		Derivative: "dx = y·(dy − Σ_C dy·y)",
		In:         []Operand{in("x", "(N,C)")},
		Out:        []Operand{out("y", "(N,C)")},
		Saves:      []string{"y"},
		check:      func(c *checker) { c.rank2(c.in(0)); c.same(c.out(0), c.in(0)) },
		flops:      func(c *checker) int64 { return (expFlops + 3) * c.out(0).elems() },
	},
	{
		Kind:  SoftmaxGrad,
		Doc:   "dx = y·(dy − Σ_C dy·y); all (N,C).",
		In:    []Operand{in("dy", "(N,C)"), in("y", "(N,C)")},
		Out:   []Operand{acc("dx", "(N,C)")},
		check: func(c *checker) { c.rank2(c.in(1)); c.same(c.in(0), c.in(1)); c.same(c.out(0), c.in(1)) },
		flops: func(c *checker) int64 { return 4 * c.out(0).elems() },
	},
	{
		Kind: Rope,
		Doc: "Rotary positions (Su et al. 2021) in the half-split layout: within each head, elements i and i+HeadDim/2 turn by " +
			"(n mod Seq)·Theta^(−2i/HeadDim), scaled as Llama 3.1 does where ScaleFactor is not 0; Inverse turns back. " +
			"x, y (N, Heads·HeadDim); y may be in place of x. With starts (N) the position is n mod Seq − starts[n].",
		Derivative: "the rotation by the opposite angle (Inverse flipped) of dy",
		In:         []Operand{in("x", "(N,Heads·HeadDim)"), startsIn()},
		Out:        []Operand{out("y", "(N,Heads·HeadDim)").over("x")},
		Attr:       RopeAttr{},
		Saves:      []string{"starts"},
		check: func(c *checker) {
			x, a := c.in(0), c.op.Attr.(RopeAttr)
			c.rope(a)
			c.matrix(x, x.rows(), a.Heads*a.HeadDim, "Heads·HeadDim")
			c.divides("Seq", a.Seq, x, "the number of rows", x.rows())
			c.same(c.out(0), x)
			c.vector(c.in(1), x.rows(), "the number of rows")
		},
		flops:    func(c *checker) int64 { return 3 * c.out(0).elems() },
		work:     Target.ropeWork,
		cudaWork: Target.ropeWork,
	},
	{
		Kind: Dropout,
		Doc: "y = x·mask/(1−P) (Srivastava et al. 2014). The mask is counter-based: a function of the run's seed, the step, Site, the " +
			"global sample index and the element's index within the sample, never of the rank. x, y the same shape, " +
			"rows of Elems elements a sample, or with Part a part of them; y may be in place of x.",
		Derivative: "the same dropout (same Site) of dy",
		In:         []Operand{in("x", "(…)"), in("key", "(NumKey)").typ(isI64)},
		Out:        []Operand{out("y", "(…)").over("x")},
		Attr:       DropoutAttr{},
		Saves:      []string{"key"},
		check: func(c *checker) {
			x, a := c.in(0), c.op.Attr.(DropoutAttr)
			c.vector(c.in(1), NumKey, "the Key slots")
			c.same(c.out(0), x)
			c.groups("Elems", a.Elems, x, "the number of elements", x.elems(), a.Part)
			if c.err == nil && !(a.P >= 0 && a.P < 1) {
				c.failf("P is %g, want a probability in [0, 1)", a.P)
			}
		},
		flops: func(c *checker) int64 { return 2 * c.out(0).elems() },
	},
	{
		Kind:       Add,
		Doc:        "y = a + b; same shapes; y may be in place of a.",
		Derivative: "da = dy; db = dy",
		In:         []Operand{in("a", "(…)"), in("b", "(…)")},
		Out:        []Operand{acc("y", "(…)").over("a")},
		check:      sameAll,
		flops:      perElem,
	},
	{
		Kind:       Sub,
		Doc:        "y = a − b; same shapes; y may be in place of a.",
		Derivative: "da = dy; db = −dy",
		In:         []Operand{in("a", "(…)"), in("b", "(…)")},
		Out:        []Operand{out("y", "(…)").over("a")},
		check:      sameAll,
		flops:      perElem,
	},
	{
		Kind:       Mul,
		Doc:        "y = a·b, elementwise; same shapes; y may be in place of a.",
		Derivative: "da = dy·b; db = dy·a",
		In:         []Operand{in("a", "(…)"), in("b", "(…)")},
		Out:        []Operand{acc("y", "(…)").over("a")},
		Saves:      []string{"a", "b"},
		check:      sameAll,
		flops:      perElem,
	},
	{
		Kind:       Scale,
		Doc:        "y = Factor·x; same shapes; y may be in place of x.",
		Derivative: "dx = Factor·dy",
		In:         []Operand{in("x", "(…)")},
		Out:        []Operand{acc("y", "(…)").over("x")},
		Attr:       ScaleAttr{},
		check:      sameAll,
		flops:      perElem,
	},
	{
		Kind:       Sum,
		Doc:        "y = Σ over all elements of x; x any shape, y f64 (1).",
		Derivative: "dx = dy, at every element",
		In:         []Operand{in("x", "(…)")},
		Out:        []Operand{acc("y", "(1)").typ(isF64)},
		check:      func(c *checker) { c.vector(c.out(0), 1, "a scalar") },
		flops:      func(c *checker) int64 { return c.in(0).elems() },
		work:       Target.sumWork,
		cudaWork:   Target.sumWork,
	},
	{
		Kind:  SumGrad,
		Doc:   "dx = dy at every element; dy f64 (1), dx any shape.",
		In:    []Operand{in("dy", "(1)").typ(isF64)},
		Out:   []Operand{acc("dx", "(…)")},
		check: func(c *checker) { c.vector(c.in(0), 1, "a scalar") },
		flops: perElem,
	},
}

func perElem(c *checker) int64 { return c.out(0).elems() }

// sameAll checks that all operands have the shape of the first input.
func sameAll(c *checker) {
	for i := 1; i < len(c.inOps); i++ {
		c.same(c.in(i), c.in(0))
	}
	c.same(c.out(0), c.in(0))
}

// cap checks the bound of a soft cap of logits. If absent is set it may be 0, for no bound.
func (c *checker) cap(v float64, absent bool) {
	if c.err == nil && !(v > 0 && v <= math.MaxFloat32) && !(absent && v == 0) {
		c.failf("Cap is %g, want a positive finite number", v)
	}
}

func (c *checker) activation(a ActKind, noneAllowed bool) {
	if c.err != nil {
		return
	}
	if err := checkAct(a, noneAllowed); err != nil {
		c.failf("%v", err)
	}
}

func checkAct(a ActKind, noneAllowed bool) error {
	switch a {
	case ActGELUTanh, ActGELU, ActSiLU, ActReLU:
		return nil
	case ActNone:
		if noneAllowed {
			return nil
		}
	}
	return fmt.Errorf("activation is %q, want %s, %s, %s or %s", a, ActGELUTanh, ActGELU, ActSiLU, ActReLU)
}

// rope checks the fields of the attribute. It does not check the operands' shapes.
func (c *checker) rope(a RopeAttr) {
	c.within("Heads", a.Heads, 1<<24)
	c.within("HeadDim", a.HeadDim, 1<<24)
	if c.err == nil && a.HeadDim%2 != 0 {
		c.failf("HeadDim is %d, want an even number (pairs turn)", a.HeadDim)
	}
	if c.err == nil && !(a.Theta > 0 && a.Theta <= math.MaxFloat64) {
		c.failf("Theta is %g, want a positive finite number", a.Theta)
	}
}

// ropeWork returns the bytes of the cosines and sines of all positions, f32.
func (t Target) ropeWork(_ *Program, op *Op) int64 {
	a := op.Attr.(RopeAttr)
	return t.align(4 * a.Seq * a.HeadDim)
}

func (t Target) sumWork(p *Program, op *Op) int64 {
	return t.align(8 * ((p.Buffers[op.In[0]].Elems() + t.SumElems - 1) / t.SumElems))
}
