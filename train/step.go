package train

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/run"
)

// before says whether to skip a micro-step, numbered from 1, and all later ones.
func (l *leaving) before(micro int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if micro > l.decided {
		l.decided = micro
		if l.why == nil {
			l.why, l.at = l.asked(), micro
		}
	}
	return l.why != nil && micro >= l.at
}

// inputsOrLeave is inputsOf that abandons the step before a micro-batch if at.leaving says so.
func (t *Trainer) inputsOrLeave(r *run.Rank, at *stepAt, micro *int) func(*graph.Phase, int) error {
	inputs := t.inputsOf(r, at, micro)
	return func(ph *graph.Phase, repeat int) error {
		if ph.Kind != graph.UpdatePhase && *micro > 0 && at.leaving.before(*micro) {
			return exec.ErrAbandoned
		}
		return inputs(ph, repeat)
	}
}

// abandoned prepares the ranks for the next step after an abandoned one. The update at the start of
// the abandoned step's first micro-step is done. If the program marks such an update as pending,
// the mark is cleared, so that it is not done again.
func (t *Trainer) abandoned() error {
	t.at.Pending = false
	flush := t.plan.Program.SectionOf(graph.SectionFlush, graph.FormWhole)
	if flush == nil {
		return nil
	}
	for i := range flush.Phases {
		for k := range flush.Phases[i].Ops {
			op := &flush.Phases[i].Ops[k]
			mark, ok := op.Attr.(graph.FillAttr)
			if !ok || t.plan.Program.Buf(op.Out[0].Buf).DType != graph.I32 {
				continue
			}
			var value [4]byte
			binary.LittleEndian.PutUint32(value[:], uint32(int32(mark.Value)))
			err := t.ranks.Each("the end of an abandoned step", func(r *run.Rank) error { return r.Exec.Write(op.Out[0].Buf, 0, value[:]) })
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// form chooses the section that the step runs: by its number of rows, and whether the cache has the
// outputs of the frozen layers.
func (t *Trainer) form(at *stepAt) error {
	form := graph.FormWhole
	if at.cached = t.prefix != nil && t.prefix.has(t.train, &t.cfg.Config, at.index); at.cached {
		form = graph.FormCached
	}
	if len(t.cfg.BatchSchedule) == 0 {
		at.section = graph.SectionName(graph.SectionStep, form)
		return nil
	}
	c := t.cfg.At(at.index)
	sec, repeats := t.plan.Program.StepOf(form, graph.StepShape{Rounds: c.Accum, Shares: c.Shares()})
	if sec == nil {
		return fmt.Errorf("the plan has no step of %d micro-batches a rank", c.Accum)
	}
	at.section, at.repeats = sec.Name, repeats
	return nil
}

// runStep runs a step on all ranks.
func (t *Trainer) runStep(at *stepAt) error {
	ran, left := make([]bool, len(t.micro)), make([]bool, len(t.micro))
	err := t.ranks.Each(fmt.Sprintf("step %d", at.index+1), func(r *run.Rank) error {
		r.Exec.SetStep(int64(at.index+1), at.repeats)
		micro := 0
		var err error
		if t.stopsNonFinite() {
			ran[r.Slot], err = r.Exec.RunGated(at.section, t.inputsOrLeave(r, at, &micro), func(norm bool) (bool, error) { return t.gate(r, norm) })
		} else {
			ran[r.Slot], err = true, r.Exec.RunSection(at.section, t.inputsOrLeave(r, at, &micro))
		}
		if errors.Is(err, exec.ErrAbandoned) {
			left[r.Slot] = true
			return nil
		}
		if err != nil || at.cached || !ran[r.Slot] {
			return err
		}
		return t.keepPrefix(r, at.index, micro-len(t.inputs))
	})
	if err != nil {
		return err
	}
	if slices.Contains(left, true) {
		at.left = true
		return t.abandoned()
	}
	at.stopped = slices.Contains(ran, false)
	return nil
}

// inputsOf returns a function that fills a rank's inputs for each run of a phase. It counts the
// micro-batches in micro.
func (t *Trainer) inputsOf(r *run.Rank, at *stepAt, micro *int) func(*graph.Phase, int) error {
	return func(ph *graph.Phase, _ int) error {
		if ph.Kind == graph.UpdatePhase {
			return nil
		}
		first := *micro
		*micro += len(t.inputs)
		var err error
		switch {
		case at.cached:
			err = t.givePrefix(r, at.index, first)
		case first > 0: // the last micro-batches' outputs are kept after the section
			err = t.keepPrefix(r, at.index, first-len(t.inputs))
		}
		for slot := range t.inputs {
			if err != nil {
				break
			}
			err = t.fill(r, t.train, at.hyper, at.index, first+slot, slot)
		}
		return err
	}
}

// hyper returns the values of the Hyper buffer for a step.
func (t *Trainer) hyper(step int, lr float64, targets int64) [graph.NumHyper]float64 {
	var h [graph.NumHyper]float64
	h[graph.HyperLR] = lr
	h[graph.HyperInvCount] = 1 / float64(targets)
	h[graph.HyperLossScale] = t.at.Scale.Scale
	updates := float64(step + 1 - t.at.Skipped) // a skipped step moves no moment
	h[graph.HyperUpdate] = updates
	h[graph.HyperSeed] = float64(t.cfg.Seed & (1<<53 - 1))
	h[graph.HyperBC1] = 1 - math.Pow(t.cfg.Beta1, updates)
	h[graph.HyperBC2] = 1 - math.Pow(t.cfg.Beta2, updates)
	return h
}

// modelFlops returns the FLOPs of the products of this process's ranks in a step.
func (t *Trainer) modelFlops(at *stepAt) float64 {
	key := stepKey{at.section, at.repeats}
	n, known := t.flops[key]
	if !known {
		p := t.plan.Program
		n = cost.ModelFlops(p.Alone(p.Section(at.section), at.repeats), at.section) * float64(len(t.micro))
		if t.flops == nil {
			t.flops = map[stepKey]float64{}
		}
		t.flops[key] = n
	}
	return n
}

// microsOfPhase returns the number of micro-batches that one run of a phase of the step computes.
func microsOfPhase(p *graph.Program) int {
	sec := p.SectionOf(graph.SectionStep, graph.FormWhole)
	if sec == nil || len(sec.Phases) == 0 {
		return 1
	}
	return sec.Phases[0].MicroBatches()
}

// fill writes the inputs of a step's micro-batch, the slot-th of those that the phase computes. A
// rank that has no such micro-batch needs no inputs.
func (t *Trainer) fill(r *run.Rank, b *batches, hyper [graph.NumHyper]float64, step, micro, slot int) error {
	if micro >= b.sampler.Share(step, t.dataRank(r)) {
		return nil
	}
	at := t.micro[r.Slot]
	at.Inputs = at.Inputs[:0]
	for _, id := range t.floats[slot] {
		v, err := r.Exec.HostF32(id)
		if err != nil {
			return err
		}
		at.Inputs = append(at.Inputs, v)
	}
	began := time.Now()
	err := b.fill(step, micro, t.dataRank(r), at)
	t.read[r.Slot] += time.Since(began)
	if err != nil {
		return err
	}
	if b == t.train && r.Index%max(t.cfg.Tensor, 1) == 0 {
		t.receipt.Filled(b.sampler, step, micro, t.dataRank(r), at, t.cfg.Batch)
	}
	var key [graph.NumKey]int64
	key[graph.KeySeed] = t.cfg.Seed
	key[graph.KeyStep] = int64(step)
	key[graph.KeySample] = b.sampler.GlobalSample(step, micro, t.dataRank(r), 0)
	ports := &t.inputs[slot]
	return errors.Join(
		fillHost(r, r.Exec.HostI32, ports[graph.PortTokens], at.Tokens), fillHost(r, r.Exec.HostI32, ports[graph.PortTargets], at.Targets),
		fillHost(r, r.Exec.HostF64, t.ports[graph.PortHyper], hyper[:]), fillHost(r, r.Exec.HostI64, ports[graph.PortKey], key[:]))
}

// dataRank returns a rank's index among the ranks with different data. Neighbouring ranks that
// share the computation of layers have the same data, and so have the stages of a pipeline.
func (t *Trainer) dataRank(r *run.Rank) int {
	return r.Index / max(t.cfg.Tensor, 1) % t.cfg.DataRanks()
}

// fillHost copies v to the start of a host buffer, if the rank has the buffer.
func fillHost[T any](r *run.Rank, host func(graph.BufID) ([]T, error), buf graph.BufID, v []T) error {
	if buf == graph.NoBuf || !r.Has(buf) {
		return nil
	}
	dst, err := host(buf)
	if err != nil {
		return err
	}
	copy(dst, v)
	return nil
}
