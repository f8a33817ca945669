package attn

import (
	"fmt"
	"sync/atomic"

	"github.com/spillway-ml/spillway/kernels/cpu/pool"
)

// Each runs several Forwards of one sequence each, which differ only in their operands and in
// Tk: a step of generation, where sequences have different numbers of keys. Results have the same
// bits as separate runs. Work has the size of ForwardWorkspace for one batch of all sequences
// with the largest Tk; the Forwards' Work is not used.
type Each[T Float] struct {
	Of   []Forward[T]
	Work []T

	ends []int // by forward: the index after its last task
	slot int   // elements of a scratch slot: the largest that a forward needs
	next atomic.Int64
}

// Run computes all of them on the pool, as Forward.Run. It allocates in the first run alone.
func (e *Each[T]) Run(p *pool.Pool) error {
	if p == nil {
		return errNoPool
	}
	if e.ends == nil {
		e.ends = make([]int, len(e.Of))
	}
	tasks := 0
	e.slot = 0
	for i := range e.Of {
		f := &e.Of[i]
		f.Work = e.Work
		if same := e.Of[0].Shape; f.B != 1 || f.Tq != same.Tq || f.D != same.D || f.Causal != same.Causal {
			return fmt.Errorf("attention: forward %d of several has B = %d, Tq = %d, D = %d, causal %v; want B = 1 and, as the first, Tq = %d, D = %d, causal %v",
				i, f.B, f.Tq, f.D, f.Causal, same.Tq, same.D, same.Causal)
		}
		if err := f.check(); err != nil {
			return err
		}
		f.prepare()
		e.slot = max(e.slot, f.forwardSlot())
		tasks += f.tasks
		e.ends[i] = tasks
	}
	if tasks == 0 {
		return nil
	}
	slots := min(tasks, maxSlots)
	if err := checkFlat("attention", "the workspace", len(e.Work), slots*e.slot); err != nil {
		return err
	}
	e.next.Store(0)
	p.Run(slots, e)
	return nil
}

// RunIndex does tasks with a slot's scratch; for the pool.
func (e *Each[T]) RunIndex(slot int) {
	scratch := e.Work[slot*e.slot : (slot+1)*e.slot]
	i := 0
	for {
		task := int(e.next.Add(1)) - 1
		for i < len(e.ends) && task >= e.ends[i] { // a slot's tasks ascend
			i++
		}
		if i == len(e.ends) {
			return
		}
		f := &e.Of[i]
		f.do(task-(e.ends[i]-f.tasks), scratch)
	}
}
