package exec

import (
	"errors"
	"slices"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
)

// Poisoning on release (tests only). The layout gives a buffer's bytes to the next buffer without
// overwriting them, so a wrong read of a dead buffer would find its old, plausible values. With
// Config.Poison it finds NaN: a fill is enqueued directly after a buffer's last operation.
//
// "Last" refers to happens-before. An operation d is a buffer's last if every other operation
// that touches the buffer happens before d. The next user of the bytes is ordered after all of
// these, so after d: by d's stream, or by an event recorded on that stream at d or later. The
// fill is enqueued between d's launch and its record, so it also comes before that user. If no
// such d exists, because two streams finish with the buffer independently, nothing is filled.
// LifeRun and host buffers are not filled. A buffer that lives over several phases is filled
// only in a phase that runs once.

// clock counts, for each stream, the operations that happen before some point.
type clock [graph.NumStreams]int

func (c *clock) join(o *clock) {
	for i := range c {
		c[i] = max(c[i], o[i])
	}
}

// bindReleases fills in the release kernels of a section's operations.
func (e *Executor) bindReleases(s *section) error {
	poisoner, ok := e.cfg.Context.(device.Poisoner)
	if !ok {
		return errors.New("poison: the device can't fill released memory")
	}
	p := e.cfg.Program
	var streams [graph.NumStreams]clock // after the stream's latest operation
	recorded := make([]clock, p.Events+1)
	position := map[*operation]int{}
	after := map[*operation]clock{}
	touching := make([][]*operation, len(p.Buffers)) // by root, in program order
	for i := range s.phases {
		for j := range s.phases[i].ops {
			o := &s.phases[i].ops[j]
			c := streams[o.op.Stream]
			for _, w := range o.op.Wait {
				c.join(&recorded[w])
			}
			c[o.op.Stream]++
			position[o] = c[o.op.Stream]
			streams[o.op.Stream], after[o] = c, c
			if o.op.Record != 0 {
				recorded[o.op.Record] = c
			}
			for _, id := range operands(o.op) {
				root, _ := p.Resolve(id, nil)
				if list := touching[root]; len(list) == 0 || list[len(list)-1] != o {
					touching[root] = append(list, o)
				}
			}
		}
	}
	keep := e.hostBuffers()
	for id, list := range touching {
		b := p.Buf(graph.BufID(id))
		if len(list) == 0 || b.Life == graph.LifeRun || slices.Contains(keep, graph.BufID(id)) {
			continue
		}
		if b.Life == graph.LifeStep && list[len(list)-1].phase.graph.Repeat != 1 {
			continue
		}
		for from := 0; from < len(list); {
			to := len(list) // end of the buffer's current life in list
			if b.Life == graph.LifePhase {
				to = from + 1
				for to < len(list) && list[to].phase == list[from].phase {
					to++
				}
			}
			last := list[to-1]
			c := after[last]
			if !slices.ContainsFunc(list[from:to], func(o *operation) bool { return c[o.op.Stream] < position[o] }) {
				ptr, err := e.ptr(graph.BufID(id))
				if err != nil {
					return err
				}
				k, err := poisoner.Poison("release "+b.Name, ptr)
				if err != nil {
					return err
				}
				last.release = append(last.release, k)
			}
			from = to
		}
	}
	for i := range s.phases {
		for j := range s.phases[i].ops {
			if o := &s.phases[i].ops[j]; o.first {
				o.release = nil // the second operation still reads the buffer, or has written to it
			}
		}
	}
	return nil
}

// hostBuffers returns the root buffers that the host reads or writes between operations or after
// a section.
func (e *Executor) hostBuffers() []graph.BufID {
	p := e.cfg.Program
	var roots []graph.BufID
	for id := range p.Buffers {
		if p.Buffers[id].Port != graph.NoPort {
			r, _ := p.Resolve(graph.BufID(id), nil)
			roots = append(roots, r)
		}
	}
	for _, id := range [...]graph.BufID{p.Loss, p.GradNorm, p.Logits} {
		if id != graph.NoBuf {
			r, _ := p.Resolve(id, nil)
			roots = append(roots, r)
		}
	}
	return roots
}
