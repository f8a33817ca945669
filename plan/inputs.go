package plan

import (
	"slices"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/zero"
)

// stagingBytes is the largest size, in bytes, of the host buffer through which states are
// initialised, loaded and saved.
const stagingBytes = 1 << 20

// stageInputs gives every input, including float inputs, a twin in host memory, which the host
// fills. Each phase then starts with copies of the inputs that its section reads:
//
//	tokens = embed…          →   copy-in:  tokens ← host/tokens ●
//	                             compute:                       ●embed…
//
// The loss, the gradient norm and, for the noise scale, the leaves' squares get twins too; the
// sharding rewrite copies them out once they are summed over the ranks. GPU kernels do not count
// correct classes: there the loss buffer holds only the sum.
func stageInputs(p *graph.Program, s *Spec) (*graph.Program, error) {
	q := p.Clone()
	if s.Target.CUDA.ProductBytes > 0 && q.CountsClasses() {
		q.Buf(q.Loss).Shape = []int64{1}
	}
	twin := func(id graph.BufID, port graph.Port) {
		if id == graph.NoBuf {
			return
		}
		b := q.Buf(id)
		hostBuffer(q, port, "host/"+b.Name, b.DType, b.Shape)
	}
	// LifeRun buffers are placed in the order in which they were added. The tokens come last: every
	// step copies all of them, so it touches the arena's highest byte even if the staging buffer,
	// which is sized later, is never full.
	q.AddBuffer(graph.Buffer{Name: "host/staging", Port: graph.PortStaging, DType: graph.U8, Shape: []int64{1}, Space: graph.Host, Class: graph.Communication, Life: graph.LifeRun, Unit: -1})
	if q.SectionOf(graph.SectionTrain, graph.FormWhole) != nil {
		hostBuffer(q, graph.PortGradNorm, "host/grad_norm", graph.F64, []int64{1})
		if s.noise() {
			hostBuffer(q, graph.PortSquares, "host/squares", graph.I64, []int64{zero.ExactLimbs})
		}
	}
	if q.Scaler != nil {
		twin(q.Scaler.State, graph.PortScale)
		twin(q.Scaler.Overflow, graph.PortOverflow)
	}
	twin(q.Key, graph.PortKey)
	twin(q.Hyper, graph.PortHyper)
	twin(q.Loss, graph.PortLoss)
	twin(q.Targets, graph.PortTargets)
	twin(q.Positions, graph.PortPositions)
	floats := floatInputs(q)
	for i := range floats {
		b := q.Buf(floats[i][0])
		floats[i][1] = hostBuffer(q, graph.PortInput, graph.InputPort(b.Name), b.DType, b.Shape)
	}
	twin(q.Tokens, graph.PortTokens)
	inputs := [][2]graph.BufID{{q.Tokens, q.Port(graph.PortTokens)}, {q.Targets, q.Port(graph.PortTargets)}, {q.Positions, q.Port(graph.PortPositions)}, {q.Hyper, q.Port(graph.PortHyper)}, {q.Key, q.Port(graph.PortKey)}}
	inputs = append(inputs, floats...)
	for i := range q.Sections {
		sec := &q.Sections[i]
		for j := range sec.Phases {
			reads := map[graph.BufID]bool{}
			if sec.Kind == graph.SectionTrain {
				reads[q.Hyper] = true // the update reads it
			}
			for k := range sec.Phases[j].Ops {
				for _, id := range sec.Phases[j].Ops[k].In {
					if id != graph.NoBuf {
						root, _ := q.Resolve(id, nil)
						reads[root] = true
					}
				}
			}
			w := graph.NewEditor(&sec.Phases[j])
			for _, in := range inputs {
				if in[0] != graph.NoBuf && reads[in[0]] {
					w.Before(0, graph.NewCopy(q.Buf(in[0]).Name+"/in", in[1], in[0], graph.CopyIn, graph.Forward, -1))
				}
			}
			w.Commit()
		}
	}
	return q, nil
}

// floatInputs lists the model's inputs other than tokens, targets, positions and step state,
// each with a second BufID for its host buffer.
func floatInputs(p *graph.Program) (list [][2]graph.BufID) {
	for id := range p.Buffers {
		b := &p.Buffers[id]
		known := slices.Contains([]graph.BufID{p.Tokens, p.Targets, p.Positions, p.Hyper, p.Key}, graph.BufID(id))
		if b.Class == graph.Inputs && b.View == nil && b.Port == graph.NoPort && b.DType == graph.F32 && !known {
			list = append(list, [2]graph.BufID{graph.BufID(id), graph.NoBuf})
		}
	}
	return list
}

func hostBuffer(p *graph.Program, port graph.Port, name string, d graph.DType, shape []int64) graph.BufID {
	return p.AddBuffer(graph.Buffer{Name: name, Port: port, DType: d, Shape: append([]int64(nil), shape...), Space: graph.Host, Class: graph.Inputs, Life: graph.LifeRun, Unit: -1})
}

// sizeStaging sets the size of the host buffer through which states are initialised, loaded
// and saved: at most stagingBytes, and no larger than the largest state.
func sizeStaging(p *graph.Program) *graph.Program {
	q := p.Clone()
	var largest int64
	for u := range q.Units {
		for _, s := range append([]graph.State{q.Units[u].Value}, q.Units[u].States...) {
			if q.Units[u].FlatLen > 0 {
				largest = max(largest, q.Buf(s.Buf).Bytes())
			}
		}
	}
	q.Buf(q.Port(graph.PortStaging)).Shape = []int64{min(largest, stagingBytes)}
	return q
}
