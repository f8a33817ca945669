package cost

import (
	"errors"
	"fmt"
	"math"

	"github.com/spillway-ml/spillway/graph"
)

// SimulateStages is Simulate of what the stages of a pipeline run, one rank of each. The ends of a
// message, and the collectives along the axis of stages, start together. An error says that the
// stages wait for each other for ever.
func SimulateStages(stages []*graph.Program, name string, m *Machine) ([]*Run, error) {
	all := make([]*simulation, len(stages))
	j := &meetings{number: map[meeting]int{}, all: all}
	left := 0
	for i, p := range stages {
		s, err := simulate(p, name, m)
		if err != nil {
			return nil, err
		}
		if len(stages) > 1 {
			s.meets, s.waits = j.of(p, s.t), make([]bool, len(s.t.Steps))
		}
		s.joint, s.changed = j, true
		all[i], left = s, left+len(s.t.Steps)
	}
	for left > 0 {
		for again := true; again; { // an operation that takes no time ends at once, so others may start
			again = false
			for _, s := range all {
				if !s.changed {
					continue
				}
				for s.start() {
					left, again = left-s.finish(s.time), true
				}
				s.changed = false
			}
		}
		if left == 0 {
			break
		}
		next := math.Inf(1)
		for _, s := range all {
			s.share()
			for st := range s.now {
				if a := &s.now[st]; a.step >= 0 {
					next = min(next, a.until)
				}
			}
		}
		if math.IsInf(next, 1) {
			return nil, errors.New("cost: the stages of the pipeline wait for each other")
		}
		for _, s := range all {
			n := s.finish(next)
			left, s.changed = left-n, n > 0
		}
	}
	runs := make([]*Run, len(all))
	for i, s := range all {
		runs[i] = s.result(s.p.Section(name))
	}
	return runs, nil
}

// simulate begins a simulation of a section.
func simulate(p *graph.Program, name string, m *Machine) (*simulation, error) {
	if err := m.Validate(); err != nil {
		return nil, err
	}
	sec := p.Section(name)
	if sec == nil {
		return nil, fmt.Errorf("cost: the program has no section %q", name)
	}
	regions, err := graph.NewRegions(p)
	if err != nil {
		return nil, fmt.Errorf("cost: %w", err)
	}
	t, err := graph.NewTrace(p, regions, sec)
	if err != nil {
		return nil, fmt.Errorf("cost: %w", err)
	}
	return newSimulation(p, m, t), nil
}

// meeting is what several stages take part in: the n-th message from one to another, or the n-th
// collective of all (from and to −1), n from 1.
type meeting struct{ from, to, n int }

// meetings numbers meetings, and says how many stages each needs and how many have come.
type meetings struct {
	number      map[meeting]int
	needs, came []int
	all         []*simulation // of the stages
}

// of lists the numbers of a stage's steps' meetings, −1 for none.
func (j *meetings) of(p *graph.Program, t *graph.Trace) []int {
	list, count := make([]int, len(t.Steps)), map[[2]int]int{}
	axis := p.AxisOf(graph.PipelineAxis)
	for i := range t.Steps {
		list[i] = -1
		ends := [2]int{-1, -1}
		switch a := t.Op(i).Attr.(type) {
		case graph.PeerAttr:
			ends = [2]int{a.From, a.To}
		case graph.GroupAttr:
			if axis < 0 || a.Axis != axis {
				continue
			}
		default:
			continue
		}
		count[ends]++
		m := meeting{ends[0], ends[1], count[ends]}
		n, ok := j.number[m]
		if !ok {
			n = len(j.needs)
			j.number[m] = n
			j.needs, j.came = append(j.needs, 0), append(j.came, 0)
		}
		j.needs[n]++
		list[i] = n
	}
	return list
}

// meet says whether step i may start as far as other stages are concerned.
func (s *simulation) meet(i int) bool {
	if s.meets == nil || s.meets[i] < 0 {
		return true
	}
	n := s.meets[i]
	if !s.waits[i] {
		s.waits[i] = true
		if s.joint.came[n]++; s.joint.came[n] == s.joint.needs[n] {
			for _, o := range s.joint.all {
				o.changed = true // who waited may start
			}
		}
	}
	return s.joint.came[n] == s.joint.needs[n]
}
