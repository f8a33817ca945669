package mesh

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// Pipeline divides the blocks of a program over the stages of a mesh axis (Huang et al. 2019,
// GPipe). Stage i has blocks first[i] to first[i+1]−1 and the operations used with them. The first
// stage also has the operations before all blocks, the last stage those after all blocks:
//
//	embed ─ h.0 ─ h.1 ─ norm ─ head      becomes, for first = 0, 1
//
//	stage 0   embed ─ h.0 ─ send                  recv ─ h.0/dx ─ embed/dw
//	stage 1                 recv ─ h.1 ─ … h.1/dx ─ send
//
// The result is still one program; each rank runs its stage's part (graph.Program.Role). A value
// that crosses stages has a buffer for each stage. Operations and their order do not change, so a
// stage's gradients have the same bits as in the undivided program.
//
// A parameter that several stages use, such as a tied head's, is on each of them, in a separate
// unit (graph.Param.TiedTo). The sharding rewrite adds up its gradients (fsdp.Reduce).
//
// p must be differentiated, have its mesh, and have one micro-batch.
func Pipeline(p *graph.Program, axis int, first []int) (*graph.Program, error) {
	c := &pipeline{
		rewriter: rewriter{p.Clone()}, axis: axis, first: first, latest: map[graph.BufID]int{},
		have: map[at]int{}, twins: map[at]graph.BufID{}, home: map[graph.BufID]int{},
	}
	for i, n := 0, p.Layers(); i < len(first); i++ {
		if i == 0 && first[i] != 0 || i > 0 && first[i] <= first[i-1] || first[i] >= n {
			return nil, fmt.Errorf("stages that begin at layers %v of %d: each needs a layer of its own", first, n)
		}
	}
	if err := c.phases(c.visit); err != nil {
		return nil, err
	}
	if err := c.units(); err != nil {
		return nil, err
	}
	for i := range c.visits {
		if err := c.connect(i); err != nil {
			return nil, err
		}
	}
	for _, v := range c.visits {
		v.phase.Ops = slices.Concat(v.phase.Ops, v.recvs, v.ops, v.sends)
	}
	return c.p, nil
}

type pipeline struct {
	rewriter
	axis   int
	first  []int
	visits []visit

	latest map[graph.BufID]int // by root: 1 + the visit that wrote it last
	have   map[at]int          // the same, for the version of a root that a stage has
	twins  map[at]graph.BufID  // the stage's own buffer or view
	home   map[graph.BufID]int // by root: the first stage that uses it, which keeps the buffer itself
}

// at identifies a buffer on a stage.
type at struct {
	id    graph.BufID
	stage int
}

// visit is the work of a micro-batch on a stage in one direction. Operations without a unit, such
// as copies of inputs, belong to the visit of the operation that follows; every stage runs them.
type visit struct {
	phase             *graph.Phase
	stage             int
	forward           bool
	recvs, ops, sends []graph.Op
}

// unit returns the unit of the first operation that has one.
func (v *visit) unit() int {
	return v.ops[slices.IndexFunc(v.ops, func(op graph.Op) bool { return op.Unit >= 0 })].Unit
}

// stageOf returns the stage of a layer.
func (c *pipeline) stageOf(layer int) int {
	next, _ := slices.BinarySearch(c.first, layer+1)
	return next - 1
}

// visit finds the stage of each operation of a phase and groups them into visits. Operations
// outside repeating blocks belong to the first stage if they come before all blocks or after the
// backward of the first block. Those between the last block's forward and backward belong to the
// last stage.
func (c *pipeline) visit(ph *graph.Phase) error {
	stage, behind, list := 0, false, []visit(nil)
	var common []graph.Op
	for _, op := range ph.Ops {
		forward := op.Pass == graph.Forward
		switch b := c.p.BlockOf(op.Unit); {
		case b.Repeats():
			stage, behind = c.stageOf(b.Index), forward
		case op.Unit < 0 && !c.inside(&op):
			common = append(common, op)
			continue
		case behind && stage == len(c.first)-1, !behind && stage == 0:
		default:
			return fmt.Errorf("%s (%s) of no layer stands between two layers", op.Name, op.Kind)
		}
		at := slices.IndexFunc(list, func(v visit) bool { return v.stage == stage && v.forward == forward })
		if at < 0 {
			at, list = len(list), append(list, visit{phase: ph, stage: stage, forward: forward})
		} else if at < len(list)-1 {
			return fmt.Errorf("%s (%s) comes back to stage %d", op.Name, op.Kind, stage)
		}
		list[at].ops = append(append(list[at].ops, common...), op)
		common = nil
	}
	if len(list) == 0 {
		return fmt.Errorf("no operation belongs to a layer")
	}
	last := &list[len(list)-1]
	last.ops = append(last.ops, common...)
	c.visits, ph.Ops = append(c.visits, list...), nil
	return nil
}

// inside says whether an operation touches an activation of a micro-batch.
func (c *pipeline) inside(op *graph.Op) (yes bool) {
	graph.Effects(op, func(e graph.Effect) { yes = yes || c.crosses(c.root(e.Buf)) })
	return yes
}

// crosses says whether values of a root buffer may be sent from stage to stage.
func (c *pipeline) crosses(root graph.BufID) bool {
	b := c.p.Buf(root)
	return b.Class == graph.Activations && b.Life == graph.LifePhase
}

// units assigns a stage to every unit, and copies parameters that several stages use to each of
// them.
func (c *pipeline) units() error {
	params := map[graph.BufID]int{} // by root of a value and of a gradient
	for i := range c.p.Params {
		for _, id := range []graph.BufID{c.p.Params[i].Value, c.p.Params[i].Grad} {
			if id != graph.NoBuf {
				params[c.root(id)] = i
			}
		}
	}
	uses := make([][]int, len(c.p.Params)) // by parameter: the stages that use it, ascending
	for _, v := range c.visits {
		for i := range v.ops {
			graph.Effects(&v.ops[i], func(e graph.Effect) {
				if q, ok := params[c.root(e.Buf)]; ok && !slices.Contains(uses[q], v.stage) {
					uses[q] = append(uses[q], v.stage)
					slices.Sort(uses[q])
				}
			})
		}
	}
	for u := range c.p.Units {
		if b := c.p.Units[u].Block; b.Repeats() {
			c.p.Units[u].Stage = c.stageOf(b.Index)
		}
	}
	for q, stages := range uses {
		prm := &c.p.Params[q]
		unit := &c.p.Units[prm.Unit]
		switch {
		case len(stages) == 0: // only operations that are not planned use it
			continue
		case unit.Block.Repeats() && (len(stages) > 1 || stages[0] != unit.Stage):
			return fmt.Errorf("parameter %s of stage %d is used by stages %v", prm.Name, unit.Stage, stages)
		case len(stages) > 1 && slices.ContainsFunc(c.p.Params, func(o graph.Param) bool {
			return o.Unit == prm.Unit && o.Name != prm.Name && o.Split == nil
		}):
			return fmt.Errorf("parameter %s is used by stages %v, and its unit %s has others too",
				prm.Name, stages, unit.Name)
		}
		unit.Stage = stages[0]
		for _, s := range stages[1:] {
			c.tie(q, s)
		}
	}
	return cmp.Or(c.trained(), c.owned())
}

// trained returns an error if a stage trains nothing: its part of the update would be useless.
func (c *pipeline) trained() error {
	trains := make([]bool, len(c.first))
	for i := range c.p.Params {
		if q := &c.p.Params[i]; q.Grad != graph.NoBuf {
			trains[c.p.Units[q.Unit].Stage] = true
		}
	}
	if i := slices.Index(trains, false); i >= 0 && slices.Contains(trains, true) {
		return fmt.Errorf("stage %d trains nothing: give each stage (Config.Stages) a layer with parameters "+
			"that are trained", i)
	}
	return nil
}

// tie copies a parameter of an earlier stage to stage s.
func (c *pipeline) tie(param, s int) {
	q, of := c.p.Params[param], c.p.Params[param].Unit
	name := staged(c.p.Units[of].Name, s)
	q.Unit = slices.IndexFunc(c.p.Units, func(u graph.Unit) bool { return u.Name == name })
	if q.Unit < 0 {
		q.Unit = len(c.p.Units)
		c.p.Units = append(c.p.Units, graph.Unit{Name: name, Block: graph.Block{Template: name, Index: -1}, Stage: s})
	}
	q.Name, q.TiedTo = staged(q.Name, s), param+1
	to := map[graph.BufID]graph.BufID{}
	for _, id := range []*graph.BufID{&q.Value, &q.Grad} {
		if *id != graph.NoBuf {
			b := c.p.Buf(*id)
			to[*id] = c.like(*id, staged(b.Name, s), b.View, b.Shape...)
			*id = to[*id]
			c.p.Buf(*id).Unit = q.Unit
		}
	}
	c.p.Params = append(c.p.Params, q)
	grad, begun := c.p.Params[param].Grad, map[graph.BufID]*graph.Phase{}
	for _, v := range c.visits {
		for i := range v.ops {
			op := &v.ops[i]
			if v.stage == s {
				if op.Unit == of {
					op.Unit = q.Unit
				}
				op.Buffers(func(id *graph.BufID) {
					if own, ok := to[*id]; ok {
						*id = own
					}
				})
			}
			for o := range op.Out { // each stage's sum starts with its own first value
				out := &op.Out[o]
				if id := out.Buf; id != graph.NoBuf && (id == grad || id == q.Grad) && begun[id] != v.phase {
					out.Mode, begun[id] = graph.Write, v.phase
				}
			}
		}
	}
}

// staged returns the name of a stage's own buffer, unit or parameter.
func staged(name string, stage int) string { return fmt.Sprintf("%s/stage.%d", name, stage) }

// owned gives operations without a unit the unit of the previous operation on the stage, or of the
// first one with a unit. It checks that all operations have a unit of their stage.
func (c *pipeline) owned() error {
	for i := range c.visits {
		v := &c.visits[i]
		unit := v.unit()
		for k := range v.ops {
			op := &v.ops[k]
			if op.Unit < 0 && !c.inside(op) {
				continue
			} else if op.Unit < 0 {
				op.Unit = unit
			}
			unit = op.Unit
			if u := &c.p.Units[unit]; u.Stage != v.stage {
				return fmt.Errorf("%s (%s) runs on stage %d, and its unit %s is of stage %d",
					op.Name, op.Kind, v.stage, u.Name, u.Stage)
			}
		}
	}
	return nil
}

// connect sends the values that a visit reads and another stage has written, and gives the visit's
// stage separate buffers.
func (c *pipeline) connect(i int) (err error) {
	v := &c.visits[i]
	for k := range v.ops {
		op := &v.ops[k]
		if op.Unit < 0 {
			continue
		}
		graph.Effects(op, func(e graph.Effect) {
			root := c.root(e.Buf)
			if !c.crosses(root) {
				return
			}
			here := at{root, v.stage}
			if n := c.latest[root]; n > 0 && n != c.have[here] && !(e.Fresh && e.Buf == root) {
				err = cmp.Or(err, c.send(root, &c.visits[n-1], v, op))
			}
			if e.Write {
				c.latest[root] = i + 1
			}
			c.have[here] = c.latest[root]
		})
		op.Buffers(func(id *graph.BufID) { *id = c.twin(*id, v.stage) })
	}
	return err
}

// send adds the operations that send a version of a buffer from one visit's stage to another's. op
// reads it there.
func (c *pipeline) send(root graph.BufID, from, to *visit, op *graph.Op) error {
	name := c.p.Buf(root).Name
	if d := from.stage - to.stage; d*d != 1 {
		return fmt.Errorf("%s (%s) of stage %d reads %s of stage %d, which is no neighbour",
			op.Name, op.Kind, to.stage, name, from.stage)
	}
	one := func(kind graph.Kind, v *visit, in []graph.BufID, out []graph.Out) graph.Op {
		o := graph.NewOp(kind, fmt.Sprintf("%s/%s.%d.%d", name, kind, from.stage, to.stage), in, out,
			graph.PeerAttr{Axis: c.axis, From: from.stage, To: to.stage})
		if o.Stream, o.Unit = graph.Comm, v.unit(); !v.forward {
			o.Pass = graph.Backward
		}
		return o
	}
	from.sends = append(from.sends, one(graph.Send, from, []graph.BufID{c.twin(root, from.stage)}, nil))
	to.recvs = append(to.recvs, one(graph.Recv, to, nil, []graph.Out{{Buf: c.twin(root, to.stage)}}))
	return nil
}

// twin returns a stage's own copy of a buffer that crosses stages, or of a view of one.
func (c *pipeline) twin(id graph.BufID, stage int) graph.BufID {
	if id == graph.NoBuf || !c.crosses(c.root(id)) {
		return id
	}
	root := c.root(id)
	if _, known := c.home[root]; !known {
		c.home[root] = stage
	}
	switch own, ok := c.twins[at{id, stage}]; {
	case c.home[root] == stage:
		return id
	case ok:
		return own
	}
	b := *c.p.Buf(id)
	if b.View != nil {
		view := *b.View
		view.Base = c.twin(view.Base, stage)
		b.View = &view
	}
	own := c.like(id, staged(b.Name, stage), b.View, b.Shape...)
	c.twins[at{id, stage}] = own
	return own
}

// Schedule is the order in which the stages of a pipeline run micro-batches.
type Schedule uint8

// Schedules. With equal stages, the bubble of both is (P−1)/(M+P−1) of a step for P stages and M
// micro-batches. GPipe keeps the activations of all M micro-batches, OneForwardOneBackward those of
// at most P−s on stage s (Narayanan et al. 2021, section 2.2).
const (
	OneForwardOneBackward Schedule = iota // after P−1−s forwards on stage s one backward follows each forward
	GPipe                                 // all forwards, then all backwards
	NumSchedules
)

var scheduleNames = [NumSchedules]string{"1f1b", "gpipe"}

func (s Schedule) String() string { return scheduleNames[s] }

// ParseSchedule returns the schedule with the given name, as String writes it.
func ParseSchedule(name string) (Schedule, error) {
	if s := slices.Index(scheduleNames[:], name); s >= 0 {
		return Schedule(s), nil
	}
	return 0, fmt.Errorf("%q is no schedule of a pipeline; use 1f1b or gpipe", name)
}

// Turn is one micro-batch's forward or backward on a stage.
type Turn struct {
	Stage, Micro int
	Forward      bool
}

// Turns lists the turns of all stages. Each comes after its dependencies: a forward after that of
// the previous stage, a backward after that of the next stage.
func (s Schedule) Turns(stages, micros int) (list []Turn) {
	forwards, backwards := make([]int, stages), make([]int, stages) // done on each stage
	for len(list) < 2*stages*micros {
		for i := range stages {
			f, b := forwards[i], backwards[i]
			switch forward := f < micros && (s == GPipe || f-b < stages-i); {
			case forward && (i == 0 || forwards[i-1] > f):
				list = append(list, Turn{i, f, true})
				forwards[i]++
			case !forward && b < micros && (i == stages-1 || backwards[i+1] > b):
				list = append(list, Turn{i, b, false})
				backwards[i]++
			}
		}
	}
	return list
}
