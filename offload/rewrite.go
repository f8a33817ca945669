package offload

import "github.com/spillway-ml/spillway/graph"

// Rewrite moves the classes that o names to host memory or disk. It inserts the copies that keep
// every operation's operands in its own space, and moves the update to its new place (update.go).
// The program must be sharded and not yet scheduled.
//
// A LifeRun buffer of a moved class gets its home in that space. Operations stay on the device,
// except these, which run on the host: updates of units whose optimizer states are off the
// device, sums of squares of gradients that are off the device (the norm is computed where the
// gradient is), and fills of buffers that are off the device. With each operation's space fixed,
// a copy protocol like that of a cache inserts the copies: see coherence.go. Activations are
// parked: see park.go.
func Rewrite(p *graph.Program, o Options) (*graph.Program, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	q := p.Clone()
	r := &rewriter{p: q, o: o, located: make([]located, 0, 2*len(q.Buffers)), hostUnits: map[int]bool{},
		mirrors: map[mirrorKey]graph.BufID{}, views: map[viewKey]graph.BufID{}, parked: map[graph.BufID]*parking{}, pieces: map[pieceKey]graph.BufID{}, stays: map[graph.BufID]bool{}}
	if !o.Active() {
		r.placeUpdate()
		return q, nil
	}
	if err := r.checkNames(); err != nil {
		return nil, err
	}
	r.classify()
	r.chooseHomes()
	r.placeUpdate()
	r.settle()
	var elems int64
	largest := make([]int64, len(q.Units))
	for id, m := range r.members {
		if m.kind < numKinds {
			largest[m.unit] = max(largest[m.unit], q.Buffers[id].Elems())
		}
	}
	for _, n := range largest {
		elems += n
	}
	r.chunk = o.chunk(elems)
	for i := range q.Sections {
		r.section(&q.Sections[i])
	}
	return q, nil
}

func (r *rewriter) section(sec *graph.Section) {
	slots := make([][]int, len(sec.Phases))
	for j := range sec.Phases {
		slots[j] = r.split(&sec.Phases[j])
	}
	before := append([]graph.Phase(nil), sec.Phases...) // the phases before any insertion
	index := r.usesAway(before)
	for j := range sec.Phases {
		ph := &sec.Phases[j]
		w := newWeave(ph)
		name := sec.Name
		if sec.Kind == graph.SectionFlush {
			name = graph.SectionStep.String() // shares the step's mirrors, since it runs the same updates
		}
		c := &coherence{r: r, w: w, sec: name, phases: before, index: index, phase: j, slot: slots[j], closed: map[graph.BufID][]closing{}}
		c.collect()
		c.run()
		if r.o.parks() {
			r.park(w)
		}
		w.commit(min(r.o.Ahead, 1) + 1)
	}
}

// usesAway lists, by phase and root, the operations that use a buffer if it is off the device or an
// operation on the host uses it. Other buffers need no copies.
func (r *rewriter) usesAway(phases []graph.Phase) [][][]int {
	away := make([]bool, len(r.p.Buffers))
	for id := range away {
		away[id] = r.p.Buffers[id].Space != graph.Device
	}
	for j := range phases {
		for i := range phases[j].Ops {
			if op := &phases[j].Ops[i]; r.onHost(op) {
				effects(op, r.root, func(root graph.BufID, _ graph.Effect) { away[root] = true })
			}
		}
	}
	index := make([][][]int, len(phases))
	for j := range phases {
		index[j] = make([][]int, len(away))
		for i := range phases[j].Ops {
			effects(&phases[j].Ops[i], r.root, func(root graph.BufID, _ graph.Effect) {
				if list := index[j][root]; away[root] && (len(list) == 0 || list[len(list)-1] != i) {
					index[j][root] = append(list, i)
				}
			})
		}
	}
	return index
}
