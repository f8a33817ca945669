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

// Divide returns the first layer of each of so many stages of a forward program, such that the
// stage with the most floating-point operations has as few as possible. What comes before and
// behind all layers counts on the first and the last. Of equal divisions it is the one whose
// earlier stages have fewer layers.
func Divide(p *graph.Program, stages int) ([]int, error) {
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
			flops, _ := graph.Cost(p, op)
			work[layer+1] += float64(flops)
		}
	}
	for i := range n {
		work[i+1] += work[i]
	}
	// most[k][i] is the least possible work of the largest of k+1 stages of layers 0 to i−1,
	// from[k][i] the first layer of the last of them.
	most, from := make([][]float64, stages), make([][]int, stages)
	for k := range stages {
		most[k], from[k] = make([]float64, n+1), make([]int, n+1)
		for i := k + 1; i <= n; i++ {
			most[k][i] = work[i]
			if k == 0 {
				continue
			}
			most[k][i] = math.Inf(1)
			for j := k; j < i; j++ {
				if w := max(most[k-1][j], work[i]-work[j]); w < most[k][i] {
					most[k][i], from[k][i] = w, j
				}
			}
		}
	}
	first := make([]int, stages)
	for k, end := stages-1, n; k > 0; k-- {
		first[k] = from[k][end]
		end = first[k]
	}
	return first, nil
}
