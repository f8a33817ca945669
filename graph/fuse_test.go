package graph_test

import (
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

// sameBits runs both programs in float32 and requires equal losses and gradients, bit for bit.
func sameBits(t *testing.T, p, q *graph.Program, seed uint64) {
	t.Helper()
	params := randomParams(p, seed)
	want, wp := lossOf[float32](t, p, seed, params)
	got, wq := lossOf[float32](t, q, seed, params)
	require.Equal(t, math.Float64bits(want), math.Float64bits(got))
	for i := range p.Params {
		if p.Params[i].Grad == graph.NoBuf {
			continue
		}
		a, err := wp.Floats(0, p.Params[i].Grad)
		require.NoError(t, err)
		b, err := wq.Floats(0, q.Params[i].Grad)
		require.NoError(t, err)
		require.Equal(t, a, b, p.Params[i].Name)
	}
}

func mlpProgram(t *testing.T, freeze string) *graph.Program {
	p := build(t, func(b *graph.Builder) {
		x := b.Linear("l1", b.Input("x", 2, 3), param(b, "w1", 3, 4), param(b, "b1", 4), graph.LinearAttr{})
		x = b.Activation("a1", x, graph.ActGELUTanh)
		x = b.Linear("l2", x, param(b, "w2", 4, 4), graph.Value{}, graph.LinearAttr{})
		x = b.Activation("a2", x, graph.ActReLU)
		b.SumLoss("loss", b.Mul("weigh", x, param(b, "c", 2, 4)))
	})
	if freeze != "" {
		_, err := graph.Freeze(p, freeze)
		require.NoError(t, err)
	}
	return p
}

func TestFuseJoinsLinearAndActivation(t *testing.T) {
	q, err := graph.Differentiate(mlpProgram(t, ""))
	require.NoError(t, err)
	before := dump(q)
	f := graph.Fuse(q)
	require.Equal(t, before, dump(q), "the input is left alone")
	checkOps(t, f)
	lines(t, `
		l1: linear(x, w1, b1) → a1, l1
		l2: linear(a1, w2, _) → a2, l2
		weigh: mul(a2, c) → weigh
		loss: sum(weigh) → +=loss
		loss/seed: loss_seed(hyper) → loss.grad
		loss/dx: sum_grad(loss.grad) → weigh.grad
		weigh/da: mul(weigh.grad, c) → a2.grad
		weigh/db: mul(weigh.grad, a2) → c.grad
		a2/dx: act_grad(a2.grad, l2) → ~a2.grad
		l2/dw: linear_dw(a1, a2.grad) → w2.grad
		l2/dx: linear_dx(a2.grad, w2) → a1.grad
		a1/dx: act_grad(a1.grad, l1) → ~a1.grad
		l1/db: bias_grad(a1.grad) → b1.grad
		l1/dw: linear_dw(x, a1.grad) → w1.grad
	`, dump(f))
	require.Equal(t, graph.LinearAttr{Act: graph.ActGELUTanh}, f.Sections[0].Phases[0].Ops[0].Attr)
	sameBits(t, q, f, 1)
}

// Fuse does not write pre if no derivative reads it.
func TestFuseDropsPreThatNothingReads(t *testing.T) {
	q, err := graph.Differentiate(mlpProgram(t, "?1"))
	require.NoError(t, err)
	f := graph.Fuse(q)
	ops := f.Sections[0].Phases[0].Ops
	require.Equal(t, graph.NoBuf, ops[0].Out[1].Buf)
	require.NotEqual(t, graph.NoBuf, ops[1].Out[1].Buf)
	sameBits(t, q, f, 1)

	p := mlpProgram(t, "")
	f = graph.Fuse(p)
	require.Equal(t, graph.NoBuf, f.Sections[0].Phases[0].Ops[1].Out[1].Buf)
	_, err = graph.Differentiate(f)
	require.ErrorContains(t, err, "differentiate l2 (linear): its activation was fused without keeping pre")
}

// A fused program that keeps pre can still be differentiated.
func TestDifferentiateOfFusedLinear(t *testing.T) {
	f := graph.Fuse(mlpProgram(t, ""))
	ops := f.Sections[0].Phases[0].Ops
	ops[0].Out[1].Buf, ops[1].Out[1].Buf = f.Find("l1"), f.Find("l2")
	q := checkGradients(t, f, 1)
	require.Contains(t, dump(q), "l2/dpre: act_grad(a2.grad, l2) → ~a2.grad")
}

func TestFuseLeavesOtherUsesAlone(t *testing.T) {
	lin := func(b *graph.Builder) graph.Value {
		return b.Linear("l", b.Input("x", 2, 3), param(b, "w", 3, 3), graph.Value{}, graph.LinearAttr{})
	}
	for name, f := range map[string]func(b *graph.Builder){
		"the sum is used elsewhere": func(b *graph.Builder) {
			y := lin(b)
			b.SumLoss("loss", b.Add("add", b.Activation("a", y, graph.ActSiLU), y))
		},
		"two activations": func(b *graph.Builder) {
			y := lin(b)
			b.SumLoss("loss", b.Add("add", b.Activation("a", y, graph.ActSiLU), b.Activation("a2", y, graph.ActReLU)))
		},
		"dropout in between, in place": func(b *graph.Builder) {
			b.SumLoss("loss", b.Activation("a", b.Dropout("d", lin(b), 0.5, 2, graph.InPlace), graph.ActSiLU))
		},
		"through a view": func(b *graph.Builder) {
			b.SumLoss("loss", b.Activation("a", b.Reshape("r", lin(b), 3, 2), graph.ActSiLU))
		},
	} {
		t.Run(name, func(t *testing.T) {
			q, err := graph.Differentiate(build(t, f))
			require.NoError(t, err)
			require.Equal(t, dump(q), dump(graph.Fuse(q)))
		})
	}
	// A value that outlives the phase is not fused away.
	p := mlpProgram(t, "")
	p.Buf(p.Find("l1")).Life = graph.LifeStep
	require.Contains(t, dump(graph.Fuse(p)), "a1: act(l1) → a1")
}

// halfMLP returns a differentiated MLP whose activations have 16 bits.
func halfMLP(t *testing.T, dt graph.DType) *graph.Program {
	p := build(t, func(b *graph.Builder) {
		x := b.Linear("l1", b.Input("x", 2, 3), param(b, "w1", 3, 4), graph.Value{}, graph.LinearAttr{})
		x = b.Activation("a1", x, graph.ActGELUTanh)
		x = b.Linear("l2", x, param(b, "w2", 4, 4), graph.Value{}, graph.LinearAttr{})
		x = b.Activation("a2", x, graph.ActReLU)
		x = b.Linear("l3", x, param(b, "w3", 4, 4), graph.Value{}, graph.LinearAttr{})
		b.SumLoss("loss", b.Mul("weigh", x, param(b, "c", 2, 4)))
	})
	q, err := graph.Differentiate(p)
	require.NoError(t, err)
	for i := range q.Buffers {
		if q.Buffers[i].DType == graph.F32 {
			q.Buffers[i].DType = dt
		}
	}
	return q
}

// An activation of the unrounded sum is fused into one operation in every program, whether pre is
// read or not.
func TestFuseTakesTheUnroundedSum(t *testing.T) {
	q := halfMLP(t, graph.F16)
	before := dump(q)
	f := graph.Fuse(q, graph.ActGELUTanh)
	require.Equal(t, before, dump(q), "the input is left alone")
	require.Contains(t, dump(f), "l1: linear_act(x, w1, _) → a1, l1\n")
	require.Contains(t, dump(f), "l2: linear(a1, w2, _) → a2, l2\n", "not of this activation")
	require.NotContains(t, dump(f), "a1: act")
	checkOps(t, f)
	require.Equal(t, graph.LinearAttr{Act: graph.ActGELUTanh}, f.Sections[0].Phases[0].Ops[0].Attr)
	require.Contains(t, dump(graph.FuseGradients(f, graph.ActGELUTanh)), "l2/dx: linear_dact(a2.grad, w2, l1) → a1.grad\n", "its gradient reads pre")

	forward := halfMLP(t, graph.F16)
	ph := &forward.Sections[0].Phases[0]
	ph.Ops = slices.DeleteFunc(ph.Ops, func(op graph.Op) bool { return op.Pass != graph.Forward })
	f = graph.Fuse(forward, graph.ActGELUTanh)
	require.Contains(t, dump(f), "l1: linear_act(x, w1, _) → a1, l1\n", "nothing reads l1")
	require.Contains(t, dump(f), "l2: linear(a1, w2, _) → a2, _\n")

	q = halfMLP(t, graph.F32)
	require.Equal(t, dump(graph.Fuse(q)), dump(graph.Fuse(q, graph.ActGELUTanh)), "of f32")
}

func TestFuseGradientsJoinsProductAndDerivative(t *testing.T) {
	q := graph.Fuse(halfMLP(t, graph.BF16))
	before := dump(q)
	f := graph.FuseGradients(q, graph.ActGELUTanh)
	require.Equal(t, before, dump(q), "the input is left alone")
	require.Contains(t, dump(f), "l2/dx: linear_dact(a2.grad, w2, l1) → a1.grad\n")
	require.NotContains(t, dump(f), "a1/dx")
	require.Contains(t, dump(f), "l3/dx: linear_dx(", "not of this activation")
	checkOps(t, f)
	for i := range f.Sections[0].Phases[0].Ops {
		if op := &f.Sections[0].Phases[0].Ops[i]; op.Kind == graph.LinearGradAct {
			require.Equal(t, graph.LinearAttr{Act: graph.ActGELUTanh}, op.Attr)
		}
	}

	require.Equal(t, before, dump(graph.FuseGradients(q)), "no activation is named")
	q = graph.Fuse(halfMLP(t, graph.F32))
	require.Equal(t, dump(q), dump(graph.FuseGradients(q, graph.ActGELUTanh)), "of f32")
	q = graph.Fuse(halfMLP(t, graph.BF16))
	q.Buf(q.Find("a1.grad")).Life = graph.LifeStep
	require.Equal(t, dump(q), dump(graph.FuseGradients(q, graph.ActGELUTanh)), "the gradient outlives the phase")
}

// in16 returns a differentiated program whose floats have the given type.
func in16(t *testing.T, dt graph.DType, f func(b *graph.Builder)) *graph.Program {
	q, err := graph.Differentiate(build(t, f))
	require.NoError(t, err)
	for i := range q.Buffers {
		if q.Buffers[i].DType == graph.F32 {
			q.Buffers[i].DType = dt
		}
	}
	return q
}

// twoBiases builds two linears with biases, the second with a transposed weight.
func twoBiases(b *graph.Builder) {
	x := b.Linear("l1", b.Input("x", 2, 3), param(b, "w1", 3, 4), param(b, "b1", 4), graph.LinearAttr{})
	x = b.Linear("l2", x, param(b, "w2", 5, 4), param(b, "b2", 5), graph.LinearAttr{TransW: true})
	b.SumLoss("loss", b.Mul("weigh", x, param(b, "c", 2, 5)))
}

func TestFuseBiasGradientsJoinsThemWithTheWeights(t *testing.T) {
	q := in16(t, graph.BF16, twoBiases)
	before := dump(q)
	require.Contains(t, before, "l2/db: bias_grad(l2.grad) → b2.grad\nl2/dw: linear_dw(l1, l2.grad) → w2.grad")
	f := graph.FuseBiasGradients(q)
	require.Equal(t, before, dump(q), "the input is left alone")
	require.Contains(t, dump(f), "l1/dw: linear_dwb(x, l1.grad) → w1.grad, b1.grad\n")
	require.Contains(t, dump(f), "l2/dw: linear_dwb(l1, l2.grad) → w2.grad, b2.grad\n")
	require.NotContains(t, dump(f), "bias_grad")
	checkOps(t, f)
	require.NoError(t, graph.VerifyOrder(f))
	f.Buf(f.Find("b2.grad")).DType = graph.F32 // of another type than the weight's: what the product could not write
	require.NoError(t, graph.Check(f, &f.Sections[0].Phases[0].Ops[len(f.Sections[0].Phases[0].Ops)-1]))

	require.Equal(t, dump(in16(t, graph.F32, twoBiases)), dump(graph.FuseBiasGradients(in16(t, graph.F32, twoBiases))), "of f32")
}

// If two linears feed one sum, they share dy. Each bias gradient joins the weight gradient of its
// own unit and order; one without such a partner is not joined.
func TestFuseBiasGradientsOfOneSum(t *testing.T) {
	q := in16(t, graph.F16, func(b *graph.Builder) {
		x := b.Input("x", 2, 3)
		y := b.Linear("l1", x, param(b, "w1", 3, 4), param(b, "b1", 4), graph.LinearAttr{})
		z := b.Linear("l2", x, param(b, "w2", 3, 4), param(b, "b2", 4), graph.LinearAttr{})
		b.SumLoss("loss", b.Mul("weigh", b.Add("add", y, z), param(b, "c", 2, 4)))
	})
	f := graph.FuseBiasGradients(q)
	require.NotContains(t, dump(f), "bias_grad")
	for _, pair := range []string{"w1.grad, b1.grad", "w2.grad, b2.grad"} {
		require.Contains(t, dump(f), "→ "+pair)
	}
	checkOps(t, f)
}

// FuseBiasGradients leaves out a rewrite that would change results.
func TestFuseBiasGradientsLeavesOthersAlone(t *testing.T) {
	at := func(p *graph.Program, name string) *graph.Op {
		for i := range p.Sections[0].Phases[0].Ops {
			if op := &p.Sections[0].Phases[0].Ops[i]; op.Name == name {
				return op
			}
		}
		t.Fatalf("no operation %s", name)
		return nil
	}
	between := func(p *graph.Program, kind graph.Kind, in graph.BufID, out graph.BufID) {
		ops := p.Sections[0].Phases[0].Ops
		op := graph.NewOp(kind, "between", []graph.BufID{in}, []graph.Out{{Buf: out}}, graph.ScaleAttr{Factor: 1})
		for i := range ops {
			if ops[i].Name == "l2/dw" {
				p.Sections[0].Phases[0].Ops = append(ops[:i:i], append([]graph.Op{op}, ops[i:]...)...)
				return
			}
		}
	}
	for name, change := range map[string]func(p *graph.Program){
		"another type":     func(p *graph.Program) { p.Buf(p.Find("b2.grad")).DType = graph.F32 },
		"another stream":   func(p *graph.Program) { at(p, "l2/db").Stream = graph.Comm },
		"another pass":     func(p *graph.Program) { at(p, "l2/db").Pass = graph.Forward },
		"another unit":     func(p *graph.Program) { at(p, "l2/db").Unit = 7 },
		"an event":         func(p *graph.Program) { at(p, "l2/db").Record = 3 },
		"a wait":           func(p *graph.Program) { at(p, "l2/db").Wait = []graph.EventID{3} },
		"a predicate":      func(p *graph.Program) { at(p, "l2/db").Skip = p.Find("x") },
		"dy is written":    func(p *graph.Program) { between(p, graph.Scale, p.Find("l2"), p.Find("l2.grad")) },
		"the sum is read":  func(p *graph.Program) { between(p, graph.Scale, p.Find("b2.grad"), p.Find("b2")) },
		"products of int8": func(p *graph.Program) { at(p, "l2/dw").Attr = graph.LinearAttr{TransW: true, Int8: true} },
	} {
		p := in16(t, graph.BF16, twoBiases)
		change(p)
		f := dump(graph.FuseBiasGradients(p))
		require.Contains(t, f, "l2/db: bias_grad(", name)
		require.Contains(t, f, "→ w1.grad, b1.grad", name)
	}
}
