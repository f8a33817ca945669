package mesh

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// Pipeline divides the blocks of a program over the stages of a mesh axis (Huang et al. 2019,
// GPipe). Stage i has blocks first[i] to first[i+1]−1 with what is used with them, the first
// stage also what comes before all blocks, the last what comes behind them:
//
//	embed ─ h.0 ─ h.1 ─ norm ─ head      becomes, for first = 0, 1
//
//	stage 0   embed ─ h.0 ─ send                  recv ─ h.0/dx ─ embed/dw
//	stage 1                 recv ─ h.1 ─ … h.1/dx ─ send
//
// The result is still one program, of which each rank runs its stage's part (graph.Program.Role).
// A value that crosses has a buffer for each stage. Operations and their order do not change, so
// that the bits of a stage's gradients are those of the whole program.
//
// A parameter that several stages use, such as a tied head's, is on each of them, in a unit of
// its own (graph.Param.TiedTo), which the sharding rewrite adds up (fsdp.Reduce).
//
// p must be differentiated, have its mesh, and be of one micro-batch.
func Pipeline(p *graph.Program, axis int, first []int) (*graph.Program, error) {
	c := &pipeline{p: p.Clone(), axis: axis, first: first}
	if err := c.check(); err != nil {
		return nil, err
	}
	visits := make([][]visit, len(c.p.Sections))
	for i := range c.p.Sections {
		sec := &c.p.Sections[i]
		ph := sec.Micro()
		if ph == nil {
			return nil, fmt.Errorf("section %q has %d phases, want one", sec.Name, len(sec.Phases))
		}
		var err error
		if visits[i], err = c.visits(ph.Ops); err != nil {
			return nil, fmt.Errorf("section %s: %w", sec.Name, err)
		}
	}
	if err := c.units(visits); err != nil {
		return nil, err
	}
	for i := range visits {
		x := &crossing{pipeline: c, latest: map[graph.BufID]int{}, have: map[at]int{}, twins: map[at]graph.BufID{}, home: map[graph.BufID]int{}}
		if err := x.connect(visits[i]); err != nil {
			return nil, fmt.Errorf("section %s: %w", c.p.Sections[i].Name, err)
		}
		ph := &c.p.Sections[i].Phases[0]
		ph.Ops = nil
		for _, v := range visits[i] {
			ph.Ops = append(append(append(ph.Ops, v.recvs...), v.ops...), v.sends...)
		}
	}
	return c.p, nil
}

type pipeline struct {
	p     *graph.Program
	axis  int
	first []int
}

// visit is what a micro-batch runs on a stage in one direction. Operations of no unit, such as
// copies of inputs, go with those behind them; every stage runs them.
type visit struct {
	stage             int
	forward           bool
	recvs, ops, sends []graph.Op
}

func (c *pipeline) check() error {
	n := layers(c.p)
	for i, f := range c.first {
		if i == 0 && f != 0 || i > 0 && f <= c.first[i-1] || f >= n {
			return fmt.Errorf("stages that begin at layers %v of %d: each needs a layer of its own", c.first, n)
		}
	}
	return nil
}

// stageOf returns the stage of a layer.
func (c *pipeline) stageOf(layer int) int {
	i, found := slices.BinarySearch(c.first, layer)
	if !found {
		i--
	}
	return i
}

// visits finds the stage of each operation. What belongs to no block that repeats is of the first
// stage before all blocks and behind the backward of the first one, and of the last stage between
// the last block's forward and backward.
func (c *pipeline) visits(ops []graph.Op) (list []visit, err error) {
	stage, behind := 0, false
	var common []graph.Op
	for i := range ops {
		op := ops[i]
		b := c.p.BlockOf(op.Unit)
		switch forward := op.Pass == graph.Forward; {
		case b.Repeats():
			stage, behind = c.stageOf(b.Index), forward
		case op.Unit < 0 && !c.inside(&op):
			common = append(common, op)
			continue
		case behind && stage == len(c.first)-1, !behind && stage == 0:
		default:
			return nil, fmt.Errorf("%s (%s) of no layer stands between two layers", op.Name, op.Kind)
		}
		n := len(list) - 1
		if n < 0 || list[n].stage != stage || list[n].forward != (op.Pass == graph.Forward) {
			if slices.ContainsFunc(list, func(v visit) bool { return v.stage == stage && v.forward == (op.Pass == graph.Forward) }) {
				return nil, fmt.Errorf("%s (%s) comes back to stage %d", op.Name, op.Kind, stage)
			}
			list, n = append(list, visit{stage: stage, forward: op.Pass == graph.Forward}), n+1
		}
		list[n].ops = append(append(list[n].ops, common...), op)
		common = nil
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("no operation belongs to a layer")
	}
	n := len(list) - 1
	list[n].ops = append(list[n].ops, common...)
	return list, nil
}

// inside says whether an operation touches what a micro-batch computes.
func (c *pipeline) inside(op *graph.Op) (yes bool) {
	graph.Effects(op, func(e graph.Effect) { yes = yes || c.crosses(c.root(e.Buf)) })
	return yes
}

func (c *pipeline) root(id graph.BufID) graph.BufID {
	r, _ := c.p.Resolve(id, nil)
	return r
}

// crosses says whether a root buffer has values that may go from stage to stage.
func (c *pipeline) crosses(root graph.BufID) bool {
	b := c.p.Buf(root)
	return b.Class == graph.Activations && b.Life == graph.LifePhase
}

// units gives every unit its stage, and parameters that several stages use to each of them.
func (c *pipeline) units(visits [][]visit) error {
	params := map[graph.BufID]int{} // by root of a value and of a gradient
	for i := range c.p.Params {
		for _, id := range []graph.BufID{c.p.Params[i].Value, c.p.Params[i].Grad} {
			if id != graph.NoBuf {
				params[c.root(id)] = i
			}
		}
	}
	uses := make([][]int, len(c.p.Params)) // by parameter: the stages that use it, ascending
	for _, list := range visits {
		for _, v := range list {
			for i := range v.ops {
				graph.Effects(&v.ops[i], func(e graph.Effect) {
					if q, ok := params[c.root(e.Buf)]; ok && !slices.Contains(uses[q], v.stage) {
						uses[q] = append(uses[q], v.stage)
						slices.Sort(uses[q])
					}
				})
			}
		}
	}
	for u := range c.p.Units {
		if b := c.p.Units[u].Block; b.Repeats() {
			c.p.Units[u].Stage = c.stageOf(b.Index)
		}
	}
	for q, stages := range uses {
		prm := &c.p.Params[q]
		switch unit := &c.p.Units[prm.Unit]; {
		case len(stages) == 0: // only what is not planned uses it
		case unit.Block.Repeats() && (len(stages) > 1 || stages[0] != unit.Stage):
			return fmt.Errorf("parameter %s of stage %d is used by stages %v", prm.Name, unit.Stage, stages)
		case len(stages) == 1:
			unit.Stage = stages[0]
		default:
			if slices.ContainsFunc(c.p.Params, func(o graph.Param) bool { return o.Unit == prm.Unit && o.Name != prm.Name && o.Split == nil }) {
				return fmt.Errorf("parameter %s is used by stages %v, and its unit %s has others too", prm.Name, stages, unit.Name)
			}
			unit.Stage = stages[0]
			for _, s := range stages[1:] {
				c.tie(q, s, visits)
			}
		}
	}
	return cmp.Or(c.trained(), c.owned(visits))
}

// trained refuses a stage that trains nothing: it would have a part of the update without a use.
func (c *pipeline) trained() error {
	trains := make([]bool, len(c.first))
	for i := range c.p.Params {
		if q := &c.p.Params[i]; q.Grad != graph.NoBuf {
			trains[c.p.Units[q.Unit].Stage] = true
		}
	}
	if i := slices.Index(trains, false); i >= 0 && slices.Contains(trains, true) {
		return fmt.Errorf("stage %d trains nothing: give each stage (Config.Stages) a layer with parameters that are trained", i)
	}
	return nil
}

// tie gives stage s a parameter that an earlier stage has too.
func (c *pipeline) tie(param, s int, visits [][]visit) {
	q := c.p.Params[param]
	of, name := q.Unit, fmt.Sprintf("%s/stage.%d", c.p.Units[q.Unit].Name, s)
	q.Unit = slices.IndexFunc(c.p.Units, func(u graph.Unit) bool { return u.Name == name })
	if q.Unit < 0 {
		q.Unit = len(c.p.Units)
		c.p.Units = append(c.p.Units, graph.Unit{Name: name, Block: graph.Block{Template: name, Index: -1}, Stage: s})
	}
	q.Name, q.TiedTo = fmt.Sprintf("%s/stage.%d", q.Name, s), param+1
	to := map[graph.BufID]graph.BufID{}
	for _, id := range []*graph.BufID{&q.Value, &q.Grad} {
		if *id != graph.NoBuf {
			b := *c.p.Buf(*id)
			b.Name, b.Unit = fmt.Sprintf("%s/stage.%d", b.Name, s), q.Unit
			b.Shape = slices.Clone(b.Shape)
			to[*id] = c.p.AddBuffer(b)
			*id = to[*id]
		}
	}
	c.p.Params = append(c.p.Params, q)
	grads := []graph.BufID{c.p.Params[param].Grad, q.Grad}
	for i := range visits {
		written := map[graph.BufID]bool{}
		for j := range visits[i] {
			v := &visits[i][j]
			for k := range v.ops {
				op := &v.ops[k]
				if v.stage == s {
					if op.Unit == of {
						op.Unit = q.Unit
					}
					replace(op, func(id graph.BufID) graph.BufID {
						if own, ok := to[id]; ok {
							return own
						}
						return id
					})
				}
				for o := range op.Out { // each stage's sum starts with its own first addend
					if out := &op.Out[o]; slices.Contains(grads, out.Buf) && out.Buf != graph.NoBuf && !written[out.Buf] {
						out.Mode, written[out.Buf] = graph.Write, true
					}
				}
			}
		}
	}
}

// owned gives operations of no unit on a stage the unit of those before or behind them, and
// checks that all others have one of their stage.
func (c *pipeline) owned(visits [][]visit) error {
	for i := range visits {
		for j := range visits[i] {
			v := &visits[i][j]
			unit := unitOf(v)
			for k := range v.ops {
				switch op := &v.ops[k]; {
				case op.Unit >= 0 && c.p.Units[op.Unit].Stage != v.stage:
					return fmt.Errorf("%s (%s) runs on stage %d, and its unit %s is of stage %d", op.Name, op.Kind, v.stage, c.p.Units[op.Unit].Name, c.p.Units[op.Unit].Stage)
				case op.Unit >= 0:
					unit = op.Unit
				case c.inside(op):
					op.Unit = unit
				}
			}
		}
	}
	return nil
}

// replace replaces an operation's operands.
func replace(op *graph.Op, by func(graph.BufID) graph.BufID) {
	one := func(id *graph.BufID) {
		if *id != graph.NoBuf {
			*id = by(*id)
		}
	}
	for i := range op.In {
		one(&op.In[i])
	}
	for i := range op.Out {
		one(&op.Out[i].Buf)
	}
	one(&op.Work)
	one(&op.Skip)
}

// at is a buffer on a stage.
type at struct {
	id    graph.BufID
	stage int
}

// crossing connects the visits of a section.
type crossing struct {
	*pipeline
	latest map[graph.BufID]int // by root: the visit that wrote it last
	have   map[at]int          // 1 + the visit whose result a stage has of a root
	twins  map[at]graph.BufID  // the stage's own buffer or view
	home   map[graph.BufID]int // by root: the first stage that uses it, which keeps the buffer itself
}

// connect sends what a stage reads and another one has written, and gives each stage buffers of
// its own.
func (x *crossing) connect(visits []visit) (err error) {
	for i := range visits {
		v := &visits[i]
		for k := range v.ops {
			op := &v.ops[k]
			if op.Unit < 0 {
				continue
			}
			graph.Effects(op, func(e graph.Effect) {
				root := x.root(e.Buf)
				if !x.crosses(root) || err != nil {
					return
				}
				if latest, known := x.latest[root]; known && x.have[at{root, v.stage}] != latest+1 && !(e.Fresh && !e.Read && e.Buf == root) {
					err = x.send(visits, root, latest, i, op)
				}
				if e.Write {
					x.latest[root] = i
				}
				x.have[at{root, v.stage}] = x.latest[root] + 1
			})
			if err != nil {
				return err
			}
			replace(op, func(id graph.BufID) graph.BufID { return x.twin(id, v.stage) })
		}
	}
	return nil
}

// send adds the operations that bring a version of a buffer to the stage of a visit, in which op
// needs it.
func (x *crossing) send(visits []visit, root graph.BufID, latest, by int, op *graph.Op) error {
	from, to := &visits[latest], &visits[by]
	if d := from.stage - to.stage; d*d != 1 {
		return fmt.Errorf("%s (%s) of stage %d reads %s of stage %d, which is no neighbour", op.Name, op.Kind, to.stage, x.p.Buf(root).Name, from.stage)
	}
	attr := graph.PeerAttr{Axis: x.axis, From: from.stage, To: to.stage}
	one := func(kind graph.Kind, v *visit, in []graph.BufID, out []graph.Out) graph.Op {
		o := graph.NewOp(kind, fmt.Sprintf("%s/%s.%d.%d", x.p.Buf(root).Name, kind, from.stage, to.stage), in, out, attr)
		if o.Stream, o.Unit = graph.Comm, unitOf(v); !v.forward {
			o.Pass = graph.Backward
		}
		return o
	}
	from.sends = append(from.sends, one(graph.Send, from, []graph.BufID{x.twin(root, from.stage)}, nil))
	to.recvs = append(to.recvs, one(graph.Recv, to, nil, []graph.Out{{Buf: x.twin(root, to.stage)}}))
	return nil
}

// unitOf is the unit of a visit's first operation that has one.
func unitOf(v *visit) int {
	return v.ops[slices.IndexFunc(v.ops, func(op graph.Op) bool { return op.Unit >= 0 })].Unit
}

// twin returns a stage's own buffer for one that crosses, or for a view of it.
func (x *crossing) twin(id graph.BufID, stage int) graph.BufID {
	root := x.root(id)
	if !x.crosses(root) {
		return id
	}
	if _, known := x.home[root]; !known {
		x.home[root] = stage
	}
	if x.home[root] == stage {
		return id
	}
	if own, ok := x.twins[at{id, stage}]; ok {
		return own
	}
	b := *x.p.Buf(id)
	b.Name, b.Shape = fmt.Sprintf("%s/stage.%d", b.Name, stage), slices.Clone(b.Shape)
	if b.View != nil {
		v := *b.View
		v.Base = x.twin(v.Base, stage)
		b.View = &v
	}
	own := x.p.AddBuffer(b)
	x.twins[at{id, stage}] = own
	return own
}
