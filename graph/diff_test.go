package graph_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

func differentiated(t *testing.T, f func(b *graph.Builder)) *graph.Program {
	t.Helper()
	return checkGradients(t, build(t, f), 1)
}

// lines compares two dumps and ignores indentation.
func lines(t *testing.T, want, got string) {
	t.Helper()
	var clean []string
	for _, l := range strings.Split(strings.TrimSpace(want), "\n") {
		clean = append(clean, strings.TrimSpace(l))
	}
	require.Equal(t, strings.Join(clean, "\n"), strings.TrimSpace(got))
}

// The gradient of a residual stream is one buffer, to which blocks add in place.
func TestResidualStreamIsAccumulatedInPlace(t *testing.T) {
	p := differentiated(t, func(b *graph.Builder) {
		x := b.Linear("in", b.Input("x", 2, 3), param(b, "w.in", 3, 3), graph.Value{}, graph.LinearAttr{})
		for i := range 2 {
			n := fmt.Sprintf("h.%d", i)
			y := b.Linear(n, b.RMSNorm(n+".norm", x, param(b, n+".g", 3), 1e-6), param(b, n+".w", 3, 3), graph.Value{}, graph.LinearAttr{})
			x = b.Add(n+".add", x, y)
		}
		b.SumLoss("loss", b.Mul("square", x, x))
	})
	lines(t, `
		loss/seed: loss_seed(hyper) → loss.grad
		loss/dx: sum_grad(loss.grad) → square.grad
		square/da: mul(square.grad, h.1.add) → h.1.add.grad
		square/db: mul(square.grad, h.1.add) → +=h.1.add.grad
		h.1/dw: linear_dw(h.1.norm, h.1.add.grad) → h.1.w.grad
		h.1/dx: linear_dx(h.1.add.grad, h.1.w) → h.1.norm.grad
		h.1.norm/dx: rmsnorm_grad(h.1.norm.grad, h.0.add, h.1.g, h.1.norm.rstd) → +=h.1.add.grad, h.1.g.grad
		h.0/dw: linear_dw(h.0.norm, h.1.add.grad) → h.0.w.grad
		h.0/dx: linear_dx(h.1.add.grad, h.0.w) → h.0.norm.grad
		h.0.norm/dx: rmsnorm_grad(h.0.norm.grad, in, h.0.g, h.0.norm.rstd) → +=h.1.add.grad, h.0.g.grad
		in/dw: linear_dw(x, h.1.add.grad) → w.in.grad
	`, backward(p))
}

// A residual block's branch reads the shared gradient after its norm's contribution is computed.
// That contribution therefore goes to a separate buffer instead of being added in place.
func TestSharedGradientIsNotAccumulatedInto(t *testing.T) {
	p := differentiated(t, func(b *graph.Builder) {
		x := b.Scale("in", param(b, "a", 2, 3), 1.5)
		y := b.Add("add", b.RMSNorm("norm", x, param(b, "g", 3), 1e-6), x)
		b.SumLoss("loss", b.Mul("weigh", y, param(b, "c", 2, 3)))
	})
	lines(t, `
		loss/seed: loss_seed(hyper) → loss.grad
		loss/dx: sum_grad(loss.grad) → weigh.grad
		weigh/da: mul(weigh.grad, c) → add.grad
		weigh/db: mul(weigh.grad, add) → c.grad
		norm/dx: rmsnorm_grad(add.grad, in, g, norm.rstd) → in.grad, g.grad
		norm/dx+: add(in.grad, add.grad) → ~in.grad
		in/dx: scale(in.grad) → a.grad
	`, backward(p))
}

// An elementwise derivative overwrites dy only if no other value uses it.
func TestElementwiseDerivativeInPlace(t *testing.T) {
	p := differentiated(t, func(b *graph.Builder) {
		x := b.Linear("in", b.Input("x", 2, 3), param(b, "w", 3, 3), graph.Value{}, graph.LinearAttr{})
		y := b.Activation("one", x, graph.ActSiLU)
		z := b.Add("add", b.Activation("two", y, graph.ActSiLU), y)
		b.SumLoss("loss", b.Mul("weigh", z, param(b, "c", 2, 3)))
	})
	lines(t, `
		loss/seed: loss_seed(hyper) → loss.grad
		loss/dx: sum_grad(loss.grad) → weigh.grad
		weigh/da: mul(weigh.grad, c) → add.grad
		weigh/db: mul(weigh.grad, add) → c.grad
		two/dx: act_grad(add.grad, one) → one.grad
		two/dx+: add(one.grad, add.grad) → ~one.grad
		one/dx: act_grad(one.grad, in) → ~one.grad
		in/dw: linear_dw(x, one.grad) → w.grad
	`, backward(p))
}

// Programs in which several gradients share a buffer: the same operand twice, and chains of sums.
func TestGradientsThatAliasEachOther(t *testing.T) {
	for name, f := range map[string]func(b *graph.Builder){
		"x + x": func(b *graph.Builder) {
			x := b.Scale("s", param(b, "a", 2, 3), 1.5)
			weigh(b, b.Add("y", x, x))
		},
		"(x + x) + x": func(b *graph.Builder) {
			x := b.Scale("s", param(b, "a", 2, 3), 1.5)
			weigh(b, b.Add("z", b.Add("y", x, x), x))
		},
		"(x + y) − (y + x), all four sharing": func(b *graph.Builder) {
			x, y := b.Scale("s", param(b, "a", 2, 3), 1.5), b.Scale("s2", param(b, "b", 2, 3), 2)
			weigh(b, b.Sub("d", b.Add("p", x, y), b.Scale("q3", b.Add("q", y, x), 3)))
		},
		"in-place sum onto a shared value": func(b *graph.Builder) {
			x := b.Scale("s", param(b, "a", 2, 3), 1.5)
			y := b.Scale("s2", x, 2)
			y = b.Add("y", y, x, graph.InPlace)
			y = b.Add("z", y, x, graph.InPlace)
			weigh(b, b.Add("w", x, y))
		},
		"through a reshape": func(b *graph.Builder) {
			x := b.Scale("s", param(b, "a", 2, 6), 1.5)
			y := b.Reshape("r", x, 3, 4)
			z := b.Linear("l", y, param(b, "w", 4, 4), graph.Value{}, graph.LinearAttr{})
			weigh(b, b.Add("y", b.Reshape("back", z, 2, 6), x))
		},
		"a parameter through a reshape": func(b *graph.Builder) {
			a := param(b, "a", 2, 6)
			weigh(b, b.Add("y", b.Reshape("r", a, 3, 4), b.Reshape("r2", a, 3, 4)))
		},
	} {
		t.Run(name, func(t *testing.T) { differentiated(t, f) })
	}
}

// Random programs with residuals, shared operands and in-place operations have the right gradients,
// or are refused because the backward reads an overwritten value.
func TestGradientsOfRandomPrograms(t *testing.T) {
	refused := 0
	const programs = 150
	for seed := range uint64(programs) {
		rng := rand.New(rand.NewPCG(seed, 9))
		p := build(t, func(b *graph.Builder) { randomProgram(b, rng) })
		for i := range p.Params {
			p.Params[i].Frozen = rng.IntN(4) == 0 && i > 0
		}
		_, err := graph.Differentiate(p)
		if err != nil {
			require.ErrorContains(t, err, "overwritten in place", "seed %d\n%s", seed, dump(p))
			refused++
			continue
		}
		checkGradients(t, p, seed)
	}
	require.Less(t, refused, programs/2)
	t.Logf("%d of %d programs refused", refused, programs)
}

func randomProgram(b *graph.Builder, rng *rand.Rand) {
	const rows, cols = 2, 4
	vals := []graph.Value{param(b, "p0", rows, cols), b.Input("x", rows, cols)}
	vals = append(vals, b.Scale("start", vals[0], 1.25))
	pick := func() graph.Value { return vals[rng.IntN(len(vals))] }
	for i := range 3 + rng.IntN(8) {
		n := fmt.Sprintf("op%d", i)
		k := rng.IntN(len(vals))
		v, w := vals[k], pick()
		var opts []graph.Option
		if k >= 2 && w != v && rng.IntN(4) == 0 {
			opts = append(opts, graph.InPlace)
		}
		var y graph.Value
		switch rng.IntN(9) {
		case 0:
			y = b.Add(n, v, w, opts...)
		case 1:
			y = b.Sub(n, v, w, opts...)
		case 2:
			y = b.Mul(n, v, w, opts...)
		case 3:
			y = b.Scale(n, v, 0.75, opts...)
		case 4:
			opts = nil
			y = b.Activation(n, v, graph.ActGELU)
		case 5:
			opts = nil
			y = b.Linear(n, v, param(b, n+".w", cols, cols), graph.Value{}, graph.LinearAttr{TransW: rng.IntN(2) == 0})
		case 6:
			opts = nil
			y = b.RMSNorm(n, v, param(b, n+".g", cols), 1e-3)
		case 7:
			y = b.Dropout(n, v, 0.3, rows, opts...)
		case 8:
			y = b.Rope(n, v, graph.RopeAttr{Heads: 1, HeadDim: cols, Seq: rows, Theta: 10}, opts...)
		}
		if len(opts) > 0 {
			vals[k] = y
		} else {
			vals = append(vals, y)
		}
	}
	// Every value reaches the loss, so every parameter has a gradient.
	for i, v := range vals {
		n := fmt.Sprintf("end%d", i)
		b.SumLoss(n+".loss", b.Mul(n, v, b.Activation(n+".act", v, graph.ActSiLU)))
	}
}

func TestCrossEntropyOverwritesLogitsThatNothingReads(t *testing.T) {
	last := func(p *graph.Program) string { return strings.SplitN(backward(p), "\n", 2)[0] }
	p := differentiated(t, func(b *graph.Builder) {
		b.CrossEntropy("loss", b.Linear("fc", b.Input("x", 4, 3), param(b, "w", 3, 5), graph.Value{}, graph.LinearAttr{}), b.Targets(4, 1))
	})
	require.Equal(t, "loss/dx: cross_entropy_grad(fc, targets, loss.lse, hyper) → ~fc", last(p))

	// The softmax's gradient reads its result, here the loss's logits, so they are kept.
	p = differentiated(t, func(b *graph.Builder) {
		b.CrossEntropy("loss", b.Softmax("soft", param(b, "a", 4, 5)), b.Targets(4, 1))
	})
	require.Equal(t, "loss/dx: cross_entropy_grad(soft, targets, loss.lse, hyper) → soft.grad", last(p))

	// The second loss is differentiated first, and the first one still reads the logits.
	p = differentiated(t, func(b *graph.Builder) {
		l := b.Scale("s", param(b, "a", 4, 5), 1.5)
		b.CrossEntropy("loss", l, b.Targets(4, 1))
		b.CrossEntropy("loss2", l, b.Targets(4, 1))
	})
	lines(t, `
		loss2/dx: cross_entropy_grad(s, targets, loss2.lse, hyper) → s.grad
		loss/dx: cross_entropy_grad(s, targets, loss.lse, hyper) → ~s
		loss/dx+: add(s.grad, s) → ~s.grad
		s/dx: scale(s.grad) → a.grad
	`, backward(p))
}

func TestFrozenParametersStopTheBackward(t *testing.T) {
	p := build(t, func(b *graph.Builder) {
		x := b.Input("x", 2, 3)
		for i := range 3 {
			n := fmt.Sprintf("l.%d", i)
			x = b.Activation(n+".act", b.Linear(n, x, param(b, n+".w", 3, 3), param(b, n+".b", 3), graph.LinearAttr{}), graph.ActGELU)
		}
		b.SumLoss("loss", x)
	})
	n, err := graph.Freeze(p, "l.0.*")
	require.NoError(t, err)
	require.Equal(t, 2, n)
	n, err = graph.Freeze(p, "l.1.w")
	require.NoError(t, err)
	require.Equal(t, 1, n)
	q := checkGradients(t, p, 1)
	// l.1 needs only its bias's gradient, l.0 none.
	lines(t, `
		loss/seed: loss_seed(hyper) → loss.grad
		loss/dx: sum_grad(loss.grad) → l.2.act.grad
		l.2.act/dx: act_grad(l.2.act.grad, l.2) → ~l.2.act.grad
		l.2/db: bias_grad(l.2.act.grad) → l.2.b.grad
		l.2/dw: linear_dw(l.1.act, l.2.act.grad) → l.2.w.grad
		l.2/dx: linear_dx(l.2.act.grad, l.2.w) → l.1.act.grad
		l.1.act/dx: act_grad(l.1.act.grad, l.1) → ~l.1.act.grad
		l.1/db: bias_grad(l.1.act.grad) → l.1.b.grad
	`, backward(q))

	_, err = graph.Freeze(p, "*")
	require.NoError(t, err)
	q, err = graph.Differentiate(p)
	require.NoError(t, err)
	require.Empty(t, backward(q))
	require.Equal(t, dump(p), dump(q))
}

func TestFreezePatterns(t *testing.T) {
	p := build(t, func(b *graph.Builder) {
		for _, u := range []string{"embed", "h.0", "h.1", "h.10"} {
			b.Unit(u)
			param(b, u+".attn.weight", 2, 2)
			param(b, u+".bias", 2)
		}
	})
	for pattern, want := range map[string]int{
		"h.1.*": 2, "h.1*": 4, "*.bias": 4, "h.?.bias": 2, "embed.attn.weight": 1, "*": 8, "h.*weight": 3, "*a*t*": 4, "**bias**": 4, "h.{0-1}.*": 4, "h.{1-10}.bias": 2,
	} {
		n, err := graph.Freeze(p.Clone(), pattern)
		require.NoError(t, err, pattern)
		require.Equal(t, want, n, pattern)
	}
	for _, pattern := range []string{"", "h", "h.2.*", "*.bias?", "transformer.h.0.*"} {
		_, err := graph.Freeze(p.Clone(), pattern)
		require.ErrorContains(t, err, fmt.Sprintf("%q: no parameter matches", pattern))
	}
	for _, pattern := range []string{"h.{1}.*", "h.[", "h.{3-1}.bias"} {
		_, err := graph.Freeze(p.Clone(), pattern)
		require.ErrorContains(t, err, "graph: freeze: ", pattern)
	}
	_, err := graph.Freeze(p, "h.1.*")
	require.NoError(t, err)
	for i, want := range []bool{false, false, false, true, false}[1:] {
		require.Equal(t, want && i == 2, p.Units[i+1].Frozen, p.Units[i+1].Name)
	}
	_, err = graph.Freeze(p, "h.0.bias")
	require.NoError(t, err)
	require.False(t, p.Units[2].Frozen, "half of it is trained")
}

func TestDifferentiateRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		f    func(b *graph.Builder)
		want string
	}{
		"no loss": {func(b *graph.Builder) { b.Scale("s", param(b, "a", 2), 2) }, "the program has no loss"},
		"a parameter that the loss does not see": {func(b *graph.Builder) {
			param(b, "lost", 2)
			b.SumLoss("loss", param(b, "a", 2))
		}, "the loss does not depend on lost; freeze"},
		"a value overwritten after it is saved": {func(b *graph.Builder) {
			x := b.Scale("s", param(b, "a", 2, 2), 2)
			y := b.Activation("act", x, graph.ActGELU)
			x = b.Scale("again", x, 2, graph.InPlace)
			b.SumLoss("loss", b.Add("sum", x, y))
		}, "differentiate act (act): its derivative reads s, which is overwritten in place"},
		"an operation that overwrites what it saves itself": {func(b *graph.Builder) {
			x := b.Scale("s", param(b, "a", 2, 2), 2)
			b.SumLoss("loss", b.Mul("m", x, param(b, "c", 2, 2), graph.InPlace))
		}, "differentiate m (mul): its derivative reads s, which is overwritten in place"},
		"a kind without derivative": {func(b *graph.Builder) {
			b.SumLoss("loss", b.SelectRow("row", param(b, "a", 4, 2)))
		}, "differentiate row (select_row): the kind has no derivative"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := graph.Differentiate(build(t, c.f))
			require.ErrorContains(t, err, c.want)
		})
	}

	p := build(t, func(b *graph.Builder) { b.SumLoss("loss", param(b, "a", 2)) })
	q, err := graph.Differentiate(p)
	require.NoError(t, err)
	_, err = graph.Differentiate(q)
	require.ErrorContains(t, err, "want a forward program")
	_, err = graph.Freeze(q, "a")
	require.ErrorContains(t, err, "freeze before differentiating")
	_, err = graph.Differentiate(&graph.Program{})
	require.ErrorContains(t, err, `no section "forward"`)

	// A view of a part of a value has no gradient.
	p = build(t, func(b *graph.Builder) {
		x := b.Scale("s", param(b, "a", 2, 2), 2)
		b.SumLoss("loss", b.Reshape("part", x, 4))
	})
	part := p.Find("part")
	p.Buf(part).Shape = []int64{2}
	p.Buf(part).View.Offset = 8
	_, err = graph.Differentiate(p)
	require.ErrorContains(t, err, "operand x (part) is a view of a part of s")
}
