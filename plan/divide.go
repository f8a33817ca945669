package plan

import (
	"fmt"
	"math"

	"github.com/dustin/go-humanize/english"

	"github.com/spillway-ml/spillway/graph"
)

// Divide returns the first layer of each of so many stages of a differentiated program, such that
// the stage with the most work has as little as possible; workOf is that of an operation. What
// belongs to no layer counts where mesh.Pipeline puts it: on the first or the last stage.
//
// Of equal divisions it is the most even one, by the sum of squares. The last stage counts twice:
// it has one micro-batch in flight, so that it waits for every message, and no other one hides it.
func Divide(p *graph.Program, stages int, workOf func(op *graph.Op) float64) ([]int, error) {
	n := p.Layers()
	if n < stages {
		return nil, fmt.Errorf("%d stages of %s: each needs a layer of its own; give at most %s", stages, english.Plural(n, "layer", ""), english.Plural(n, "stage", ""))
	}
	work := make([]float64, n+1) // work[i]: of all layers before i
	layer := 0
	for i := range p.Sections[0].Phases {
		for k := range p.Sections[0].Phases[i].Ops {
			op := &p.Sections[0].Phases[i].Ops[k]
			if b := p.BlockOf(op.Unit); b.Repeats() {
				layer = b.Index
			}
			work[layer+1] += workOf(op)
		}
	}
	for i := range n {
		work[i+1] += work[i]
	}
	of := func(_, i, j int) float64 { return work[j] - work[i] }
	most, _ := divide(stages, n, of, func(a, b float64) float64 { return max(a, b) })
	_, first := divide(stages, n, func(stage, i, j int) float64 {
		w := of(stage, i, j)
		switch {
		case w > most*(1+1e-9): // sums of the same layers' work round differently
			return math.Inf(1)
		case stage == stages-1:
			return float64(2 * w * w)
		}
		return float64(w * w)
	}, func(a, b float64) float64 { return a + b })
	return first, nil
}

// divide returns the first of each stage's layers for which the sum of the stages' costs, as add
// adds them, is least, and that sum. cost is that of a stage of layers i to j−1.
func divide(stages, layers int, cost func(stage, i, j int) float64, add func(a, b float64) float64) (float64, []int) {
	// sum[k][i] is the least cost of stages 0 to k with layers 0 to i−1, from[k][i] the first
	// layer of the last of them.
	sum, from := make([][]float64, stages), make([][]int, stages)
	for k := range stages {
		sum[k], from[k] = make([]float64, layers+1), make([]int, layers+1)
		for i := k + 1; i <= layers; i++ {
			if k == 0 {
				sum[k][i] = cost(0, 0, i)
				continue
			}
			sum[k][i], from[k][i] = math.Inf(1), k
			for j := k; j < i; j++ {
				if c := add(sum[k-1][j], cost(k, j, i)); c < sum[k][i] {
					sum[k][i], from[k][i] = c, j
				}
			}
		}
	}
	first := make([]int, stages)
	for k, end := stages-1, layers; k > 0; k-- {
		first[k] = from[k][end]
		end = first[k]
	}
	return sum[stages-1][layers], first
}
