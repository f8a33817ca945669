package graph

import (
	"fmt"
	"slices"
)

// The order of execution.
//
// A section's phases run in order, phase i Repeat times in a row. Streams are
// in-order queues that persist across phases: nothing joins them at the end of
// a phase or between two repetitions. An operation starts when the one before
// it on its stream has finished and each event that it waits for has been
// recorded; a wait refers to the latest record of the event before the wait in
// program order, and a record happens when its operation finishes. Between two
// sections, and between two runs of one section, everything is synchronised.
// Section "init" runs first; then the others run in any order, any number of
// times.
//
// Operation a happens before b if a chain of these rules says so. Two operations
// that touch the same bytes, one of them writing, must be ordered by it, and two
// buffers may share bytes only if it puts all uses of one before those of the
// other.
//
// A phase with Repeat ≥ 2 is checked as two copies, which is enough:
//
//   - Repetitions k and k+1 are alike for every k: a wait refers to a record of the same
//     repetition, of the previous one, or of an earlier phase. So an order between copies 1 and 2
//     also holds between k and k+1.
//   - Between k and k+2: if every use u in one repetition happens before every use v in the next,
//     then u(k) → v(k+1) → v(k+2), the last by v's own stream. Larger distances follow by
//     induction.
//   - Operations before the loop are ordered against its first repetition (copy 1), and through
//     the streams against all others. Operations after the loop see the latest records, those of
//     the last repetition (copy 2), and through the streams all others.
//
// Vector clocks, with one counter a stream, find the orders (Fidge; Mattern, Virtual Time and
// Global States of Distributed Systems, 1989).

// Trace is one run of a section, with its operations in program order. A repeated phase occurs
// twice.
type Trace struct {
	Section *Section
	Steps   []Step

	p       *Program
	regions *Regions
	// before gives, for each step and stream, the last step of that stream that has finished when
	// the step starts; −1 for none.
	before []vclock
	// unrecorded are waits for an event that no earlier operation of the section records.
	unrecorded []badWait
}

// Step is one executed operation: Section.Phases[Phase].Ops[Op] in copy Copy (0 or 1) of a
// repeated phase.
type Step struct{ Phase, Copy, Op int32 }

type badWait struct {
	step  int
	event EventID
}

// vclock gives, for each stream, the index of its latest operation that is known to have finished;
// −1 for none.
type vclock [NumStreams]int32

// NewTrace expands section s of p. It fails if an operation names a buffer, stream or event
// that p does not have.
func NewTrace(p *Program, regions *Regions, s *Section) (*Trace, error) {
	t := &Trace{Section: s, p: p, regions: regions}
	n := 0
	for i := range s.Phases {
		n += copies(&s.Phases[i]) * len(s.Phases[i].Ops)
	}
	t.Steps = make([]Step, 0, n)
	t.before = make([]vclock, 0, n)
	var now [NumStreams]vclock // by stream: the steps known to have finished before its next one
	for st := range now {
		for u := range now[st] {
			now[st][u] = -1
		}
	}
	recorded := make([]int32, p.Events+1) // by event: the step of its latest record, plus 1
	for pi := range s.Phases {
		ph := &s.Phases[pi]
		for oi := range ph.Ops {
			if err := p.checkRefs(&ph.Ops[oi]); err != nil {
				return nil, fmt.Errorf("%s/%s/%s: %w", s.Name, ph.Name, ph.Ops[oi].Name, err)
			}
		}
		for c := range copies(ph) {
			for oi := range ph.Ops {
				op := &ph.Ops[oi]
				i := int32(len(t.Steps))
				clock := &now[op.Stream]
				for _, e := range op.Wait {
					j := recorded[e] - 1
					if j < 0 {
						t.unrecorded = append(t.unrecorded, badWait{int(i), e})
						continue
					}
					for u, k := range t.before[j] {
						clock[u] = max(clock[u], k)
					}
					from := t.Op(int(j)).Stream
					clock[from] = max(clock[from], j)
				}
				t.Steps = append(t.Steps, Step{int32(pi), int32(c), int32(oi)})
				t.before = append(t.before, *clock)
				clock[op.Stream] = i
				if op.Record != 0 {
					recorded[op.Record] = i + 1
				}
			}
		}
	}
	return t, nil
}

func copies(ph *Phase) int { return max(0, min(ph.Repeat, 2)) }

// checkRefs returns an error if op names a buffer, stream or event that p does not have.
func (p *Program) checkRefs(op *Op) error {
	if op.Stream >= NumStreams {
		return fmt.Errorf("%v is not one of the %d streams", op.Stream, NumStreams)
	}
	var err error
	buf := func(what string, i int, id BufID) {
		if err == nil && id != NoBuf && (id < 0 || int(id) >= len(p.Buffers)) {
			err = fmt.Errorf("%s %d is buffer %d, want one of the program's %d", what, i, id, len(p.Buffers))
		}
	}
	for i, id := range op.In {
		buf("input", i, id)
	}
	for i, o := range op.Out {
		buf("output", i, o.Buf)
	}
	buf("workspace", 0, op.Work)
	buf("skip flag", 0, op.Skip)
	if err != nil {
		return err
	}
	for _, e := range op.Wait {
		if e < 1 || int(e) > p.Events {
			return fmt.Errorf("waits for event %d, want one of 1 to %d", e, p.Events)
		}
	}
	if op.Record < 0 || int(op.Record) > p.Events {
		return fmt.Errorf("records event %d, want one of 1 to %d, or 0 for none", op.Record, p.Events)
	}
	return nil
}

// Program returns the program to which the trace belongs.
func (t *Trace) Program() *Program { return t.p }

// Op returns the operation of step i.
func (t *Trace) Op(i int) *Op {
	s := t.Steps[i]
	return &t.Section.Phases[s.Phase].Ops[s.Op]
}

// Label returns "section/phase/operation" of step i.
func (t *Trace) Label(i int) string {
	return t.Section.Name + "/" + t.Section.Phases[t.Steps[i].Phase].Name + "/" + t.Op(i).Name
}

// Before says whether step i has always finished when step j starts.
func (t *Trace) Before(i, j int) bool { return int32(i) <= t.before[j][t.Op(i).Stream] }

// Known returns the last step of stream st that has always finished when step j starts, −1
// for none.
func (t *Trace) Known(j int, st StreamID) int { return int(t.before[j][st]) }

// sameOccurrence says whether two steps are in the same copy of the same phase.
func (t *Trace) sameOccurrence(i, j int) bool {
	a, b := t.Steps[i], t.Steps[j]
	return a.Phase == b.Phase && a.Copy == b.Copy
}

// LiveRange is a sequence of uses of one root buffer in one section. The first use overwrites all
// old contents, and no use after the last reads the contents. Outside the range the buffer's bytes
// are free. Steps are in increasing order. If Kept is set the range lasts to the end of the
// section, because the host may then read the buffer.
type LiveRange struct {
	Buf   BufID
	Steps []int32
	Kept  bool
}

// isResult says whether root holds one of the values that the host may read at the end of a
// section: Loss, GradNorm, Logits.
func (p *Program) isResult(regions *Regions, root BufID) bool {
	for _, id := range [...]BufID{p.Loss, p.GradNorm, p.Logits} {
		if id >= 0 && int(id) < len(p.Buffers) && regions.Of[id].Root == root {
			return true
		}
	}
	return false
}

// LiveRanges returns the live ranges of all root buffers that the section uses and whose
// contents do not outlive it (LifePhase and LifeStep), ordered by buffer and then by time. A
// buffer that is completely rewritten after its last read has several ranges, and is free
// between them:
//
//	gather w ── use w ─┐ free ┌─ gather w ── use w
//
// It tracks single bytes, so a buffer that is written in parts counts too. If the position of a
// part depends on the rank, only two writes replace it: one of the same part, or one that covers
// the part on every rank.
func (t *Trace) LiveRanges() []LiveRange {
	type use struct {
		step int32
		eff  Effect
	}
	p := t.p
	count := make([]int32, len(p.Buffers)+1)
	all := make([]use, 0, 4*len(t.Steps))
	for i := range t.Steps {
		Effects(t.Op(i), func(e Effect) {
			if root := t.regions.Of[e.Buf].Root; p.Buffers[root].Life != LifeRun {
				all = append(all, use{int32(i), e})
				count[root+1]++
			}
		})
	}
	for i := 1; i < len(count); i++ {
		count[i] += count[i-1]
	}
	uses := make([]use, len(all)) // by root
	next := append([]int32(nil), count...)
	for _, u := range all {
		root := t.regions.Of[u.eff.Buf].Root
		uses[next[root]] = u
		next[root]++
	}

	var ranges []LiveRange
	steps := make([]int32, 0, len(uses)) // of all ranges
	live := newByteSet(t.regions)
	for root := range p.Buffers {
		list := uses[count[root]:count[root+1]]
		if len(list) == 0 {
			continue
		}
		// Walk backwards: live holds the bytes that a later use still reads.
		first := len(ranges)
		phase := p.Buffers[root].Life == LifePhase
		live.clear()
		from := len(steps) // of the current range
		kept := p.isResult(t.regions, BufID(root))
		if kept {
			live.add(t.regions.Of[root])
		}
		for hi := len(list); hi > 0; {
			lo := hi - 1
			for lo > 0 && list[lo-1].step == list[hi-1].step {
				lo--
			}
			step := list[lo].step
			for _, u := range list[lo:hi] {
				if u.eff.Fresh {
					live.remove(t.regions.Of[u.eff.Buf])
				}
			}
			for _, u := range list[lo:hi] {
				if u.eff.Read {
					live.add(t.regions.Of[u.eff.Buf])
				}
			}
			steps = append(steps, step)
			hi = lo
			if hi == 0 || live.empty() || phase && !t.sameOccurrence(int(list[hi-1].step), int(step)) {
				own := steps[from:len(steps):len(steps)]
				slices.Reverse(own)
				ranges = append(ranges, LiveRange{Buf: BufID(root), Steps: own, Kept: kept})
				kept, from = false, len(steps)
				live.clear()
			}
		}
		slices.Reverse(ranges[first:])
	}
	return ranges
}
