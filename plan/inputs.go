package plan

import (
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/recompute"
)

// stagingBytes is how much of a resident state passes through host memory at a
// time when states are initialised, loaded and saved.
const stagingBytes = 1 << 20

// stageInputs gives every input a twin in host memory, which the host fills,
// and starts each phase with the copies of those that its section reads:
//
//	tokens = embed…          →   copy-in:  tokens ← host/tokens ●
//	                             compute:                       ●embed…
//
// The loss and the gradient norm get twins too; the sharding rewrite copies
// them out once they are summed over the ranks.
func stageInputs(p *graph.Program) *graph.Program {
	q := p.Clone()
	twin := func(id graph.BufID, into *graph.BufID) {
		if id == graph.NoBuf {
			return
		}
		b := q.Buf(id)
		*into = hostBuffer(q, "host/"+b.Name, b.DType, b.Shape)
	}
	// Resident buffers lie in the order in which they were made. The tokens come
	// last: every step copies all of them, so the arena's highest byte is touched
	// even where the staging buffer (sized later) is never full.
	q.Staging = q.AddBuffer(graph.Buffer{Name: "host/staging", DType: graph.U8, Shape: []int64{1}, Space: graph.Host, Class: graph.Communication, Life: graph.LifeRun, Unit: -1})
	if q.Section("train") != nil {
		q.HostGradNorm = hostBuffer(q, "host/grad_norm", graph.F64, []int64{1})
	}
	if q.Scaler != nil {
		twin(q.Scaler.State, &q.Scaler.HostState)
		twin(q.Scaler.Overflow, &q.Scaler.HostFlag)
	}
	twin(q.Key, &q.HostKey)
	twin(q.Hyper, &q.HostHyper)
	twin(q.Loss, &q.HostLoss)
	twin(q.Targets, &q.HostTargets)
	twin(q.Tokens, &q.HostTokens)
	inputs := [][2]graph.BufID{{q.Tokens, q.HostTokens}, {q.Targets, q.HostTargets}, {q.Hyper, q.HostHyper}, {q.Key, q.HostKey}}
	for i := range q.Sections {
		sec := &q.Sections[i]
		for j := range sec.Phases {
			reads := map[graph.BufID]bool{}
			if sec.Name == "train" || sec.Name == recompute.CachedTrain {
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
			var copies []graph.Op
			for _, in := range inputs {
				if in[0] == graph.NoBuf || !reads[in[0]] {
					continue
				}
				copies = append(copies, graph.Op{Kind: graph.Copy, Name: q.Buf(in[0]).Name + "/in", In: []graph.BufID{in[1]}, Out: []graph.Out{{Buf: in[0]}},
					Work: graph.NoBuf, Skip: graph.NoBuf, Stream: graph.CopyIn, Pass: graph.Forward, Unit: -1})
			}
			sec.Phases[j].Ops = append(copies, sec.Phases[j].Ops...)
		}
	}
	return q
}

func hostBuffer(p *graph.Program, name string, d graph.DType, shape []int64) graph.BufID {
	return p.AddBuffer(graph.Buffer{Name: name, DType: d, Shape: append([]int64(nil), shape...), Space: graph.Host, Class: graph.Inputs, Life: graph.LifeRun, Unit: -1})
}

// sizeStaging sizes the host buffer through which states move: no larger than
// the largest of them.
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
	q.Buf(q.Staging).Shape = []int64{min(largest, stagingBytes)}
	return q
}
