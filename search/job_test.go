package search

import (
	"sync"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/zero"
)

// job trains a model that build makes for a shape, with AdamW on a CPU.
type job struct {
	build  func(Shape) (*graph.Program, error)
	layers int
	target graph.Target
	stages int // number of pipeline stages

	mu    sync.Mutex
	built map[Shape]*graph.Program // by its fp32 shape
}

func (j *job) At(sh Shape) (at plan.Spec, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	key := sh
	key.Precision = precision.FP32
	if j.built == nil {
		j.built = map[Shape]*graph.Program{}
	}
	if j.built[key] == nil {
		if j.built[key], err = j.build(sh); err != nil {
			return at, err
		}
	}
	at.Forward.Train = j.built[key]
	at.Config = plan.Config{Precision: sh.Precision, Optimizer: zero.Optimizer{Name: "adamw", Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1}, Target: j.target, Pipeline: j.stages}
	if j.target == (graph.Target{}) {
		at.Target = graph.CPUTarget()
	}
	return at, nil
}

// Outside estimates the memory of the process outside the arenas, divided by the ranks.
func (j *job) Outside(p *plan.Plan) [graph.NumSpaces]int64 {
	all := p.Config.Outside
	ops := 0
	for i := range p.Program.Sections {
		for k := range p.Program.Sections[i].Phases {
			ops += len(p.Program.Sections[i].Phases[k].Ops)
		}
	}
	all[graph.Host] += 27<<20/int64(p.Config.Ranks) + 1850*int64(ops)
	return all
}

// spec returns the job at stage 3 on the given number of ranks.
func (j *job) spec(ranks, batch, seq int) Spec {
	return Spec{Job: j, Ranks: ranks, Pipeline: j.stages, Stage: 3, Batch: batch, Seq: seq, Accum: 1, Prefetch: 1, Layers: j.layers}
}

// gpt2 has a vocabulary of 256 and 256 positions.
func gpt2(layers, width int) *job {
	return &job{layers: layers, build: func(sh Shape) (*graph.Program, error) {
		n := layers
		if sh.Layers > 0 {
			n = sh.Layers
		}
		return model.Build(model.Config{Family: model.GPT2, Layers: n, Width: width, Heads: 4, Vocab: 256, Positions: 256, TiedHead: true}, model.Train, sh.Batch, sh.Seq)
	}}
}
