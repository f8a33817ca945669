package mesh

import (
	"fmt"
	"math"

	"github.com/spillway-ml/spillway/graph"
)

// Schedule is the order in which the stages of a pipeline take micro-batches.
type Schedule uint8

// Schedules. The bubble of both, with equal stages, is (P−1)/(M+P−1) of a step for P stages and
// M micro-batches. GPipe keeps the activations of all M, OneForwardOneBackward those of at most
// P−s on stage s (Narayanan et al. 2021, section 2.2).
const (
	OneForwardOneBackward Schedule = iota // after P−1−s forwards on stage s one backward follows each forward
	GPipe                                 // all forwards, then all backwards
	NumSchedules
)

var scheduleNames = [NumSchedules]string{"1f1b", "gpipe"}

func (s Schedule) String() string { return scheduleNames[s] }

// ParseSchedule is the reverse of String.
func ParseSchedule(name string) (Schedule, error) {
	for s, n := range scheduleNames {
		if n == name {
			return Schedule(s), nil
		}
	}
	return 0, fmt.Errorf("%q is no schedule of a pipeline; use 1f1b or gpipe", name)
}

// Turn is one micro-batch's forward or backward on a stage.
type Turn struct {
	Stage, Micro int
	Forward      bool
}

// OfStage lists the turns of a stage in order, for so many stages and micro-batches.
func (s Schedule) OfStage(stage, stages, micros int) (list []Turn) {
	ahead := micros
	if s == OneForwardOneBackward {
		ahead = min(stages-1-stage, micros)
	}
	for m := range ahead {
		list = append(list, Turn{stage, m, true})
	}
	for m := range micros {
		if next := ahead + m; next < micros {
			list = append(list, Turn{stage, next, true})
		}
		list = append(list, Turn{stage, m, false})
	}
	return list
}

// Turns lists the turns of all stages such that each comes behind what it needs: a forward
// behind the stage before, a backward behind the stage after.
func (s Schedule) Turns(stages, micros int) (list []Turn) {
	var queue [][]Turn
	for stage := range stages {
		queue = append(queue, s.OfStage(stage, stages, micros))
	}
	done := map[Turn]bool{}
	for len(list) < 2*stages*micros {
		for stage := range stages {
			if len(queue[stage]) == 0 {
				continue
			}
			t := queue[stage][0]
			needs := Turn{stage - 1, t.Micro, true}
			if !t.Forward {
				needs = Turn{stage + 1, t.Micro, false}
			}
			if needs.Stage >= 0 && needs.Stage < stages && !done[needs] {
				continue
			}
			queue[stage], list, done[t] = queue[stage][1:], append(list, t), true
		}
	}
	return list
}

// layers returns the number of a program's blocks that repeat.
func layers(p *graph.Program) (n int) {
	for u := range p.Units {
		if b := p.Units[u].Block; b.Repeats() {
			n = max(n, b.Index+1)
		}
	}
	return n
}

// Divide returns the first layer of each of so many stages of a differentiated program, such that
// the stage with the most work has as little as possible; workOf is that of an operation. What
// belongs to no layer counts where Pipeline puts it: on the first or the last stage.
//
// Of equal divisions it is the most even one, by the sum of squares. The last stage counts twice:
// it has one micro-batch in flight, so that it waits for every message, and no other one hides it.
func Divide(p *graph.Program, stages int, workOf func(op *graph.Op) float64) ([]int, error) {
	n := layers(p)
	if n < stages {
		return nil, fmt.Errorf("%d stages of %d layers: each needs a layer of its own; give at most %d", stages, n, n)
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
	largest := func(a, b float64) float64 { return max(a, b) }
	most, _ := divide(stages, n, func(_, i, j int) float64 { return work[j] - work[i] }, largest)
	_, first := divide(stages, n, func(stage, i, j int) float64 {
		w := work[j] - work[i]
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
