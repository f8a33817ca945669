package cost

import (
	"math"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// Run is the predicted timing of one run of a section.
type Run struct {
	Trace   *graph.Trace // contains repeated phases twice
	Start   []float64    // by step of the trace: s from the start of the section
	End     []float64
	Seconds float64                   // of the section, all repetitions counted
	Busy    [graph.NumStreams]float64 // s in which each stream is busy, all repetitions counted
	Pass    map[graph.Pass]float64    // s of computation by pass, all repetitions counted
	Exposed float64                   // s of Seconds in which the compute stream is idle
	// Products and Attention are s of the compute stream in matrix products and in attention,
	// all repetitions counted.
	Products, Attention float64
}

// Simulate runs section name of p on m. An operation starts when the one before it on its
// stream and all operations whose events it waits for have finished. For a phase that repeats,
// the time of the second copy is used for all further repetitions.
//
// If ranks share cores, all of them are assumed to do the same at the same time. Running
// operations share the cores equally, but none gets more than it can use (max-min fairness);
// the disk is shared in the same way. The shares are constant between two starts or ends of
// operations.
func Simulate(p *graph.Program, name string, m *Machine) (*Run, error) {
	runs, err := SimulateStages([]*graph.Program{p}, name, m)
	if err != nil {
		return nil, err
	}
	return runs[0], nil
}

// simulation is the state of Simulate at one point in time.
type simulation struct {
	p *graph.Program
	m *Machine
	t *graph.Trace

	queue   [graph.NumStreams][]int // steps that have not started, by stream
	now     [graph.NumStreams]active
	time    float64
	done    []bool
	behind  [graph.NumStreams]int // a step that the stream's next waits for; it may be done by now
	started []float64
	ended   []float64
	changed bool // something ended or met since start last found nothing

	joint *meetings // with the simulations of other stages
	meets []int     // by step: the number of its meeting; nil: there are no other stages
	waits []bool    // by step: it is ready, and has come to its meeting
}

// active is the operation that a stream is running.
type active struct {
	step  int // −1: nothing
	work  Work
	until float64 // s: when it ends, if nothing starts or ends before
	rest  float64 // if cores are shared: share of the work that is left, and how fast it falls (1/s)
	speed float64
}

func newSimulation(p *graph.Program, m *Machine, t *graph.Trace) *simulation {
	n := len(t.Steps)
	s := &simulation{p: p, m: m, t: t, done: make([]bool, n), started: make([]float64, n), ended: make([]float64, n), time: m.Start}
	var count [graph.NumStreams]int
	for i := range t.Steps {
		count[t.Op(i).Stream]++
	}
	for st := range s.queue {
		s.queue[st] = make([]int, 0, count[st])
		s.now[st].step, s.behind[st] = -1, -1
	}
	for i := range t.Steps {
		st := t.Op(i).Stream
		s.queue[st] = append(s.queue[st], i)
	}
	return s
}

// start starts all operations that can start, and says whether there were any.
func (s *simulation) start() (any bool) {
	for st := range s.now {
		if s.now[st].step >= 0 || len(s.queue[st]) == 0 || s.behind[st] >= 0 && !s.done[s.behind[st]] {
			continue
		}
		i := s.queue[st][0]
		s.behind[st] = -1
		for u := range graph.NumStreams {
			if j := s.t.Known(i, u); j >= 0 && !s.done[j] {
				s.behind[st] = j
				break
			}
		}
		if s.behind[st] >= 0 || !s.meet(i) {
			continue
		}
		op := s.t.Op(i)
		w := s.m.Op(s.p, op)
		if len(op.Wait) > 0 && op.Kind != graph.Join {
			w = w.later(s.m.Handoff)
		}
		s.queue[st] = s.queue[st][1:]
		s.now[st] = active{step: i, work: w, until: s.time + w.Alone, rest: 1}
		if w.Core > 0 {
			s.now[st].until = math.Inf(1) // until share computes it
		}
		s.started[i] = s.time
		any = true
	}
	return any
}

// finish advances the time to at and returns how many operations have ended by then.
func (s *simulation) finish(at float64) (n int) {
	passed := at - s.time
	s.time = at
	for st := range s.now {
		a := &s.now[st]
		switch {
		case a.step < 0:
		case a.until <= at:
			s.done[a.step], s.ended[a.step] = true, at
			a.step = -1
			n++
		case s.m.Cores > 0:
			a.rest -= float64(passed * a.speed)
		}
	}
	return n
}

// share sets the speed of running operations, if it depends on what else is running.
func (s *simulation) share() {
	if s.m.Cores == 0 {
		return
	}
	disks := 0
	for st := range s.now {
		if a := &s.now[st]; a.step >= 0 {
			a.speed = math.Inf(1)
			if a.work.Alone > 0 {
				a.speed = 1 / a.work.Alone
			}
			if a.work.Disk > 0 {
				disks++
			}
		}
	}
	sharers := float64(max(s.m.Sharers, 1))
	for st := range s.now {
		if a := &s.now[st]; a.step >= 0 && a.work.Disk > 0 {
			a.speed = min(a.speed, 1/(a.work.Disk*sharers*float64(disks)))
		}
	}
	// Divide the cores, starting with the operation that can use the least.
	var order [graph.NumStreams]*active
	n := 0
	for st := range s.now {
		a := &s.now[st]
		if a.step < 0 || a.work.Core <= 0 {
			continue
		}
		k := n
		for k > 0 && order[k-1].speed*order[k-1].work.Core > a.speed*a.work.Core {
			order[k] = order[k-1]
			k--
		}
		order[k] = a
		n++
	}
	free := float64(s.m.Cores) / sharers
	for k := range n {
		a := order[k]
		got := min(a.speed*a.work.Core, free/float64(n-k))
		a.speed = got / a.work.Core
		free -= got
	}
	for st := range s.now {
		if a := &s.now[st]; a.step >= 0 {
			a.until = s.time + max(0, a.rest)/a.speed
		}
	}
}

func (s *simulation) result(sec *graph.Section) *Run {
	r := &Run{Trace: s.t, Start: s.started, End: s.ended, Pass: map[graph.Pass]float64{}}
	all := s.m.Start // latest end so far
	before := 0.0    // latest end before copy 1 of the current phase
	prior := graph.Step{Phase: -1}
	extra := 0.0
	settle := func() {
		if prior.Phase >= 0 {
			if ph := &sec.Phases[prior.Phase]; ph.Repeat > 2 {
				extra += float64(float64(ph.Repeat-2) * (all - before))
			}
		}
	}
	for i := range s.t.Steps {
		at := s.t.Steps[i]
		if at.Phase != prior.Phase {
			settle()
		} else if at.Copy != prior.Copy {
			before = all
		}
		prior = at
		op := s.t.Op(i)
		d := r.End[i] - r.Start[i]
		all = max(all, r.End[i])
		times := 1.0
		if ph := &sec.Phases[at.Phase]; at.Copy == 1 && ph.Repeat > 2 {
			times = float64(ph.Repeat - 1)
		}
		r.Busy[op.Stream] += float64(times * d)
		if op.Stream == graph.Compute || op.Stream == graph.HostWork {
			r.Pass[op.Pass] += float64(times * d)
		}
		switch {
		case op.Stream != graph.Compute:
		case slices.Contains(products, op.Kind):
			r.Products += float64(times * d)
		case slices.Contains(attention, op.Kind):
			r.Attention += float64(times * d)
		}
	}
	settle()
	// The end of two simulated copies may be copies of data that computation would hide in
	// further repetitions. The section takes at least the time of its computation.
	r.Seconds = max(all+extra, s.m.Start+r.Busy[graph.Compute])
	r.Exposed = max(0, r.Seconds-r.Busy[graph.Compute])
	return r
}
