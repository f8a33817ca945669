package plan

import (
	"fmt"
	"math"

	"github.com/dustin/go-humanize/english"

	"github.com/spillway-ml/spillway/graph"
)

// Divide divides the layers of a differentiated program over pipeline stages and returns the first
// layer of each stage. It minimizes the largest work of a stage; workOf returns an operation's
// work. Operations outside the layers count where mesh.Pipeline puts them: on the first or the last
// stage.
//
// Among equal divisions it returns the most even one, by the sum of squares. The last stage's
// square counts twice: it has one micro-batch in flight, so that nothing hides its waits for
// messages.
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

// divide returns the division with the least total cost: that cost, and the first layer of each
// stage. cost is the cost of a stage with layers i to j−1; add combines the costs of stages.
func divide(stages, layers int, cost func(stage, i, j int) float64, add func(a, b float64) float64) (float64, []int) {
	// sum[k][i] is the least cost of stages 0 to k with layers 0 to i−1, and from[k][i] is then the
	// first layer of stage k.
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
