package graph_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/progtext"
)

// Every kind accepts all its compute operands in 16 bits, or all in f32, but no mixture. Parameter
// gradients may be f32 too. Other operands keep their type.
func TestFloatsOfAnOperationAreOfOneType(t *testing.T) {
	mixed, widened := 0, 0
	for kind, list := range samples(t) {
		for _, s := range list {
			info, _ := s.op.Info()
			ins, outs := info.Operands(s.op.Attr)
			op := graph.CloneOps([]graph.Op{s.op})[0]
			p := s.p.Clone()
			// half gives 16 bits to the buffers that flexible operands use, in every use.
			made := map[graph.BufID]graph.BufID{}
			half := func(o graph.Operand, id *graph.BufID, only graph.FloatRule) {
				if *id == graph.NoBuf || o.Float != only {
					return
				}
				if _, ok := made[*id]; !ok {
					b := *p.Buf(*id)
					b.DType, b.View = graph.BF16, nil
					made[*id] = p.AddBuffer(b)
				}
				*id = made[*id]
			}
			compute := func(only graph.FloatRule) {
				for i := range op.In {
					half(ins[i], &op.In[i], only)
				}
				for i := range op.Out {
					half(outs[i], &op.Out[i].Buf, only)
				}
			}
			compute(graph.ComputeFloat)
			require.NoError(t, graph.Check(p, &op), "%s in bf16, gradients in f32", kind)
			compute(graph.GradFloat)
			require.NoError(t, graph.Check(p, &op), "%s in bf16", kind)
			if len(made) > 0 {
				widened++
			}
			// Change one of several operands back to f32, or to the other 16-bit type.
			for i := range op.In {
				if op.In[i] == graph.NoBuf || ins[i].Float != graph.ComputeFloat || len(made) < 2 || other(op, i) {
					continue
				}
				for _, dt := range []graph.DType{graph.F32, graph.F16} {
					bad := graph.CloneOps([]graph.Op{op})[0]
					b := *p.Buf(op.In[i])
					b.DType = dt
					bad.In[i] = p.AddBuffer(b)
					err := graph.Check(p, &bad)
					if onlyGrads(p, outs, bad, ins, i) && dt == graph.F32 {
						continue
					}
					require.Error(t, err, "%s with %s in %v", kind, ins[i].Name, dt)
					require.Regexp(t, `operand \w+ \(.*\) is (bf16|f16|f32), want (bf16|f16|f32) \(as \w+\)`, err.Error())
					mixed++
				}
			}
			// A statistic, a coefficient or a moment in 16 bits is refused.
			for i := range op.Out {
				if o := outs[i]; op.Out[i].Buf != graph.NoBuf && len(o.Types) == 1 {
					bad := graph.CloneOps([]graph.Op{op})[0]
					b := *p.Buf(op.Out[i].Buf)
					b.DType, b.View = graph.BF16, nil
					bad.Out[i].Buf = p.AddBuffer(b)
					require.ErrorContains(t, graph.Check(p, &bad), "is bf16, want "+o.Types[0].String(), "%s %s", kind, o.Name)
				}
			}
		}
	}
	require.Greater(t, widened, 40)
	require.Greater(t, mixed, 40)
}

// other reports whether operand i's buffer has a second use in the operation.
func other(op graph.Op, i int) bool {
	for j, id := range op.In {
		if j != i && id == op.In[i] {
			return true
		}
	}
	for _, o := range op.Out {
		if o.Buf == op.In[i] {
			return true
		}
	}
	return false
}

// onlyGrads reports whether input i is the only operand of the compute type. Gradients may then
// have another type.
func onlyGrads(p *graph.Program, outs []graph.Operand, op graph.Op, ins []graph.Operand, i int) bool {
	for j := range op.In {
		if j != i && op.In[j] != graph.NoBuf && ins[j].Float == graph.ComputeFloat {
			return false
		}
	}
	for j := range op.Out {
		if op.Out[j].Buf != graph.NoBuf && outs[j].Float == graph.ComputeFloat {
			return false
		}
	}
	return true
}

func TestCastChecks(t *testing.T) {
	p := &graph.Program{}
	buf := func(name string, dt graph.DType, n int64) graph.BufID {
		return p.AddBuffer(graph.Buffer{Name: name, DType: dt, Shape: []int64{n}, Unit: -1})
	}
	a, b, same, long, ints := buf("a", graph.F32, 4), buf("b", graph.F16, 4), buf("same", graph.F32, 4), buf("long", graph.BF16, 5), buf("ints", graph.I32, 4)
	check := func(in, out graph.BufID, mode graph.Mode) error {
		return graph.Check(p, &graph.Op{Kind: graph.Cast, Name: "c", In: []graph.BufID{in}, Out: []graph.Out{{Buf: out, Mode: mode}}, Work: graph.NoBuf, Skip: graph.NoBuf})
	}
	require.NoError(t, check(a, b, graph.Write))
	require.NoError(t, check(b, a, graph.Accum))
	require.ErrorContains(t, check(a, same, graph.Write), "operand dst (same) is f32, as src is; want another type")
	require.ErrorContains(t, check(a, long, graph.Write), "dimension 0 is 5, want 4 (as src)")
	require.ErrorContains(t, check(ints, a, graph.Write), "operand src (ints) is i32, want f32 or bf16 or f16")
	require.ErrorContains(t, check(a, b, graph.ReadWrite), "mode rw")
}

// The loss scale's buffers are kept by the text form and by Clone.
func TestScalerInText(t *testing.T) {
	p := graph.NewBuilder()
	q, err := p.Program()
	require.NoError(t, err)
	q.Scaler = &graph.Scaler{}
	q.Scaler.State = q.AddBuffer(graph.Buffer{Name: "s", DType: graph.F64, Shape: []int64{graph.NumScale}, Life: graph.LifeRun, Unit: -1})
	q.Scaler.Overflow = q.AddBuffer(graph.Buffer{Name: "o", DType: graph.I32, Shape: []int64{1}, Unit: -1})
	back, err := progtext.Parse(graph.Format(q))
	require.NoError(t, err)
	require.Equal(t, *q.Scaler, *back.Scaler)
	require.NoError(t, graph.Verify(back))
	c := q.Clone()
	c.Scaler.Overflow = graph.NoBuf
	require.NotEqual(t, graph.NoBuf, q.Scaler.Overflow)
	q.Scaler.State = q.Scaler.Overflow
	require.ErrorContains(t, graph.Verify(q), "loss-scale (o) is i32, want f64")
}
