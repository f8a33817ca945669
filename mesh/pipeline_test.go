package mesh

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/model"
)

// deep holds test models of four layers. In each family one model's output matrix is tied to the
// embedding.
var deep = map[string]model.Config{
	"gpt2":       {Family: model.GPT2, Layers: 4, Width: 16, Heads: 4, Vocab: 21, Positions: 6, TiedHead: true},
	"gpt2 apart": {Family: model.GPT2, Layers: 4, Width: 16, Heads: 4, Vocab: 21, Positions: 6},
	"llama":      {Family: model.Llama, Layers: 4, Width: 16, FFN: 24, Heads: 8, KVHeads: 4, HeadDim: 2, Vocab: 30, Positions: 6, NormEps: 1e-5, RopeTheta: 1e4},
	"qwen3":      {Family: model.Llama, Layers: 4, Width: 16, FFN: 24, Heads: 4, KVHeads: 4, HeadDim: 6, Vocab: 32, Positions: 6, NormEps: 1e-5, RopeTheta: 1e4, NormHeads: true, TiedHead: true},
}

// inStages divides a program into stages. The pipeline axis has size len(first).
func inStages(t testing.TB, p *graph.Program, first ...int) *graph.Program {
	q := p.Clone()
	q.Mesh = []graph.Axis{{Name: graph.PipelineAxis, Size: len(first)}}
	q, err := Pipeline(q, 0, first)
	require.NoError(t, err)
	require.NoError(t, graph.VerifyStructure(q))
	return q
}

var divisions = [][]int{{0, 2}, {0, 1, 3}, {0, 1, 2, 3}, {0, 3}}

// A program in stages has the same loss and gradients as the undivided one, bit for bit. Only a
// tied table's gradient may differ, because it is the sum of the gradients on two stages.
func TestStagesHaveTheGradients(t *testing.T) {
	for name, m := range deep {
		p := differentiated(t, m)
		wantLoss, want := ran[float32](t, p, m.Vocab)
		for _, first := range divisions {
			q := inStages(t, p, first...)
			for i := range q.Params {
				if of := q.Params[i].TiedTo; of > 0 {
					require.Equal(t, q.Params[of-1].Shape, q.Params[i].Shape)
					require.Equal(t, len(first)-1, q.Units[q.Params[i].Unit].Stage)
				}
			}
			loss, got := ran[float32](t, alone(q), m.Vocab)
			require.Equal(t, wantLoss, loss, "%s in stages %v", name, first)
			for i := range want {
				if m.TiedHead && i == 0 {
					require.InDeltaSlice(t, want[i], got[i], 1e-5, "%s in stages %v: %s", name, first, p.Params[i].Name)
					continue
				}
				require.Equal(t, want[i], got[i], "%s in stages %v: %s", name, first, p.Params[i].Name)
			}
		}
	}
}

// alone adds the operations that sum a tied gradient and copy the tied value, so that one rank can
// run a program in stages.
func alone(p *graph.Program) *graph.Program {
	q := p.Clone()
	q.Mesh = nil
	ops := q.Sections[0].Phases[0].Ops
	for i := range q.Params {
		if of := q.Params[i].TiedTo; of > 0 {
			home := &q.Params[of-1]
			ops = slices.Insert(ops, 0, graph.NewCopy("value", home.Value, q.Params[i].Value, graph.Compute, graph.Forward, -1))
			ops = append(ops, graph.NewOp(graph.Scale, "sum", []graph.BufID{q.Params[i].Grad}, []graph.Out{{Buf: home.Grad, Mode: graph.Accum}}, graph.ScaleAttr{Factor: 1}))
		}
	}
	q.Sections[0].Phases[0].Ops = ops
	return q
}

// Each stage writes only its own buffers. Neighbours exchange the residual stream forward and its
// gradient backward, once each (Huang et al. 2019).
func TestRolesAreApart(t *testing.T) {
	for name, m := range deep {
		for _, first := range divisions {
			q := inStages(t, differentiated(t, m), first...)
			written := map[graph.BufID]int{}
			sent := 0
			for stage := range first {
				role, ids := q.Role(stage)
				whole := make([]graph.BufID, len(role.Buffers)) // by ID in the role: the ID in q
				for id, own := range ids {
					if own != graph.NoBuf {
						whole[own] = graph.BufID(id)
					}
				}
				for _, op := range role.Sections[0].Phases[0].Ops {
					what := fmt.Sprintf("%s in stages %v: %s", name, first, op.Name)
					if op.Kind == graph.Send {
						require.Equal(t, int64(10*m.Width), role.Buf(op.In[0]).Elems(), what)
						sent++
					}
					graph.Effects(&op, func(e graph.Effect) {
						root, _ := q.Resolve(whole[e.Buf], nil)
						if e.Write && root != q.Loss {
							was, ok := written[root]
							require.True(t, !ok || was == stage, what)
							written[root] = stage
						}
					})
				}
			}
			require.Equal(t, 2*(len(first)-1), sent, name)
		}
	}
}

// Pipeline refuses divisions in which a stage has no layer, and programs that it cannot divide.
func TestStagesThatCannotBe(t *testing.T) {
	p := differentiated(t, deep["llama"])
	for _, c := range []struct {
		first []int
		want  string
	}{
		{[]int{0, 4}, "each needs a layer of its own"},
		{[]int{1, 2}, "each needs a layer of its own"},
		{[]int{0, 2, 2}, "each needs a layer of its own"},
	} {
		q := p.Clone()
		q.Mesh = []graph.Axis{{Name: graph.PipelineAxis, Size: len(c.first)}}
		_, err := Pipeline(q, 0, c.first)
		require.ErrorContains(t, err, c.want)
	}
	m := deep["llama"]
	q, err := model.Build(m, model.Train, 2, 5)
	require.NoError(t, err)
	for _, pattern := range []string{"model.layers.{0-1}.*", "model.embed_tokens.*"} {
		_, err = graph.Freeze(q, pattern)
		require.NoError(t, err)
	}
	q, err = graph.Differentiate(q)
	require.NoError(t, err)
	q.Mesh = []graph.Axis{{Name: graph.PipelineAxis, Size: 2}}
	_, err = Pipeline(q, 0, []int{0, 2})
	require.ErrorContains(t, err, "stage 0 trains nothing")
	_, err = Pipeline(q, 0, []int{0, 3})
	require.NoError(t, err)
}

// Under every schedule a micro-batch's forward runs after its forward on the stage before, and its
// backward after its backward on the stage after. Each stage runs the micro-batches in order. Under
// 1F1B, stage s of P has at most P−s micro-batches in flight.
func TestTurns(t *testing.T) {
	for schedule := range NumSchedules {
		name, err := ParseSchedule(schedule.String())
		require.NoError(t, err)
		require.Equal(t, schedule, name)
		for stages := 1; stages < 7; stages++ {
			for micros := 1; micros < 10; micros++ {
				done, flight := map[Turn]bool{}, make([]int, stages)
				next := map[[2]int]int{}
				for _, turn := range schedule.Turns(stages, micros) {
					before, direction := Turn{turn.Stage - 1, turn.Micro, true}, 1
					if !turn.Forward {
						before, direction = Turn{turn.Stage + 1, turn.Micro, false}, 0
						require.True(t, done[Turn{turn.Stage, turn.Micro, true}])
					}
					require.True(t, before.Stage < 0 || before.Stage == stages || done[before])
					key := [2]int{turn.Stage, direction}
					require.Equal(t, next[key], turn.Micro)
					next[key]++
					done[turn] = true
					if flight[turn.Stage] += 2*direction - 1; schedule == OneForwardOneBackward {
						require.LessOrEqual(t, flight[turn.Stage], stages-turn.Stage)
					}
				}
				require.Len(t, done, 2*stages*micros)
			}
		}
	}
	_, err := ParseSchedule("dapple")
	require.ErrorContains(t, err, "use 1f1b or gpipe")
}
