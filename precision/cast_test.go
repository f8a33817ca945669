package precision_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/precision"
)

func differentiated(t *testing.T, build func(b *graph.Builder)) *graph.Program {
	b := graph.NewBuilder()
	b.Unit("u")
	build(b)
	p, err := b.Program()
	require.NoError(t, err)
	q, err := graph.Differentiate(p)
	require.NoError(t, err)
	return q
}

func cast(t *testing.T, p *graph.Program, o precision.Options) *graph.Program {
	before := graph.Hash(p)
	q, err := precision.Cast(p, o)
	require.NoError(t, err)
	require.NoError(t, graph.Verify(q))
	require.Equal(t, before, graph.Hash(p), "a rewrite leaves its input alone")
	return q
}

// types returns the types of an operation's inputs, "->", and the types of its outputs.
func types(t *testing.T, p *graph.Program, name string) (list []string) {
	for _, op := range p.Sections[0].Phases[0].Ops {
		if op.Name != name {
			continue
		}
		for _, id := range op.In {
			list = append(list, typeOf(p, id))
		}
		list = append(list, "->")
		for _, o := range op.Out {
			list = append(list, typeOf(p, o.Buf))
		}
		return list
	}
	require.Fail(t, "no operation "+name)
	return nil
}

func typeOf(p *graph.Program, id graph.BufID) string {
	if id == graph.NoBuf {
		return "_"
	}
	return p.Buf(id).DType.String()
}

func classifier(b *graph.Builder) {
	x := b.Input("x", 6, 8)
	h := b.Linear("fc", x, b.Param("fc.w", graph.Normal(0.1), 5, 8), b.Param("fc.b", graph.Zeros, 5), graph.LinearAttr{TransW: true})
	h = b.LayerNorm("ln", h, b.Param("ln.g", graph.Ones, 5), b.Param("ln.b", graph.Zeros, 5), 1e-5)
	h = b.Linear("out", h, b.Param("out.w", graph.Normal(0.1), 4, 5), graph.Value{}, graph.LinearAttr{TransW: true})
	b.CrossEntropy("loss", h, b.Targets(6, 1))
}

func TestCastTypes(t *testing.T) {
	p := cast(t, differentiated(t, classifier), precision.Options{Precision: precision.BF16})
	require.Nil(t, p.Scaler)
	want := map[string][]string{
		"fc":      {"bf16", "bf16", "bf16", "->", "bf16"},
		"ln":      {"bf16", "bf16", "bf16", "->", "bf16", "f32", "f32"},
		"loss":    {"f32", "i32", "->", "f64", "f32"},
		"loss/dx": {"f32", "i32", "f32", "f64", "->", "f32"},
		"out/dw":  {"bf16", "bf16", "->", "bf16"},
		"out/dx":  {"bf16", "bf16", "->", "bf16"},
		"ln/dx":   {"bf16", "bf16", "bf16", "f32", "f32", "->", "bf16", "bf16", "bf16"},
		"fc/dw":   {"bf16", "bf16", "->", "bf16"},
	}
	for name, list := range want {
		require.Equal(t, list, types(t, p, name), name)
	}
	// The input is cast once for forward and backward. The logits are cast to f32 for the loss, and
	// their gradient back.
	var casts []string
	for _, op := range p.Sections[0].Phases[0].Ops {
		if op.Kind == graph.Cast {
			casts = append(casts, op.Name)
		}
	}
	require.Equal(t, []string{"x/bf16", "out/f32", "out/bf16"}, casts)
	require.Equal(t, "f32", typeOf(p, bufNamed(t, p, "x")), "the host fills it")
	require.Equal(t, graph.Activations, p.Buf(bufNamed(t, p, "x.bf16")).Class)

	p = cast(t, differentiated(t, classifier), precision.Options{Precision: precision.FP16, Grads32: true})
	require.NotNil(t, p.Scaler)
	require.Equal(t, []string{"f16", "f16", "->", "f32"}, types(t, p, "fc/dw"), "products add up in f32 and stay there")
	require.Equal(t, []string{"f16", "f16", "f16", "f32", "f32", "->", "f16", "f32", "f32"}, types(t, p, "ln/dx"))

	same := differentiated(t, classifier)
	q, err := precision.Cast(same, precision.Options{})
	require.NoError(t, err)
	require.Same(t, same, q, "fp32 is what the program is in")
}

// A parameter gradient is f32, but the operation that computes it has only one float type. Its
// result is cast and then added.
func TestGradientsThatCannotBeF32(t *testing.T) {
	p := differentiated(t, func(b *graph.Builder) {
		w := b.Param("w", graph.Ones, 4, 4)
		b.SumLoss("loss", b.Mul("y", w, w))
	})
	p = cast(t, p, precision.Options{Precision: precision.BF16, Grads32: true})
	require.Equal(t, "f32", typeOf(p, p.Params[0].Grad))
	last := p.Sections[0].Phases[0].Ops[len(p.Sections[0].Phases[0].Ops)-1]
	require.Equal(t, graph.Cast, last.Kind)
	require.Equal(t, p.Params[0].Grad, last.Out[0].Buf, "the phase ends with the gradient where it is looked for")
}

// Generated logits are f32 in a bf16 program, because the host reads them.
func TestGeneratedLogitsAreF32(t *testing.T) {
	p, err := model.Build(gpt, model.Generate, 1, seq)
	require.NoError(t, err)
	p = cast(t, p, precision.Options{Precision: precision.BF16})
	require.Equal(t, "f32", typeOf(p, p.Logits))
	ops := p.Sections[0].Phases[0].Ops
	require.Equal(t, graph.Cast, ops[len(ops)-1].Kind)
	require.Equal(t, p.Logits, ops[len(ops)-1].Out[0].Buf)
}

func bufNamed(t *testing.T, p *graph.Program, name string) graph.BufID {
	for i := range p.Buffers {
		if p.Buffers[i].Name == name {
			return graph.BufID(i)
		}
	}
	require.Fail(t, "no buffer "+name)
	return graph.NoBuf
}

func TestRefusals(t *testing.T) {
	_, err := precision.Parse("fp8")
	require.EqualError(t, err, `precision: "fp8" is not known; use one of fp32, bf16, fp16`)
	got, err := precision.Parse("BF16")
	require.NoError(t, err)
	require.Equal(t, precision.BF16, got)
	require.Equal(t, "precision(9)", precision.Precision(9).String())

	p := differentiated(t, classifier)
	_, err = precision.Cast(p, precision.Options{Precision: 9})
	require.ErrorContains(t, err, "precision(9) is not a precision")
	p.Units[0].FlatLen = 256
	_, err = precision.Cast(p, precision.Options{Precision: precision.BF16})
	require.ErrorContains(t, err, "cast before sharding")
}
