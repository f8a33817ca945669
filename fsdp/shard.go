package fsdp

import (
	"fmt"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/zero"
)

// Options of the sharding rewrite.
type Options struct {
	Stage        zero.Stage
	Axis         int  // mesh axis to shard over; ranks of the other one, if there is one, hold replicas
	Accum        int  // micro-steps a step, at least 1
	Reproducible bool // stages 0 and 1 reduce every micro-step, as 2 and 3 do
	Prefetch     int  // how many use regions ahead parameters are gathered; 0: not ahead
	Optimizer    zero.Optimizer
	Clip         float64 // largest global gradient norm; 0: off
	Reduce32     bool    // gradients of 16-bit parameters travel and rest in f32
}

// Validate refuses options out of range.
func (o Options) Validate(p *graph.Program) error {
	if o.Axis < 0 || o.Axis >= len(p.Mesh) {
		return fmt.Errorf("fsdp: shard axis %d of a mesh of %d axes", o.Axis, len(p.Mesh))
	}
	if len(p.Mesh) > 2 {
		return fmt.Errorf("fsdp: a mesh of %d axes; one to shard over and one of replicas are the most", len(p.Mesh))
	}
	if o.Accum < 1 {
		return fmt.Errorf("fsdp: %d micro-steps a step; at least 1 is needed", o.Accum)
	}
	if o.Prefetch < 0 {
		return fmt.Errorf("fsdp: prefetch distance %d is negative", o.Prefetch)
	}
	return o.Optimizer.Validate()
}

// Shard turns a program with a section "train" (one phase: forward and
// backward of a micro-batch) and forward-only sections into what the ranks of
// one mesh axis run: "init", "step" (its micro-step phases) in every form that
// "train" has, "update" in parts that the next pass places (zero.Optimizer.Section),
// and the forward-only sections, with collectives, streams and throttles; graph.Schedule
// gives them their events.
//
//	stage   after the last micro-step's backward of u      after the update of u
//	0       all_reduce(grad/u)                             –
//	1       reduce_scatter(grad/u) in place                all_gather(value/u) in place
//	2       every micro-step: reduce_scatter → reduced/u   all_gather(value/u) in place
//	3       as 2                                           –; all_gather before each use region
//
// Along a mesh's second axis ranks hold replicas (HSDP): what a shard's ranks
// have reduced is all-reduced over that axis, once a step; gathers and norms
// stay within the shard axis.
//
// One rank has nothing to shard: every stage is then stage 0 without collectives
// along the shard axis.
//
// Parameters of 16 bits (package precision) get an f32 master in the shard, from
// which a section "refresh" makes them anew after the host has written it; see
// grads.go for their gradients.
func Shard(p *graph.Program, o Options) (*graph.Program, error) {
	if err := o.Validate(p); err != nil {
		return nil, err
	}
	if p.SectionOf(graph.SectionTrain, graph.FormWhole).Micro() == nil {
		return nil, fmt.Errorf("fsdp: the program has no section \"train\" of one phase")
	}
	ranks := p.Mesh[o.Axis].Size
	q, err := Flatten(p, ranks)
	if err != nil {
		return nil, err
	}
	if ranks == 1 {
		o.Stage = zero.Replicate
	}
	s := &sharder{p: q, o: o, ranks: ranks, replicas: 1, replicate: -1, units: make([]unitBufs, len(q.Units)), gathered: map[gatherKey]*gathered{}}
	if len(q.Mesh) == 2 {
		s.replicate = 1 - o.Axis
		s.replicas = q.Mesh[s.replicate].Size
	}
	if err := s.allocate(); err != nil {
		return nil, err
	}

	var sections []graph.Section
	init := s.initSection()
	if len(init.Phases[0].Ops) > 0 {
		sections = append(sections, init)
	}
	if refresh := s.refreshSection(); len(refresh.Phases[0].Ops) > 0 {
		sections = append(sections, refresh)
	}
	for i := range q.Sections {
		sec := &q.Sections[i]
		if sec.Kind == graph.SectionTrain {
			sections = append(sections, s.stepSection(sec))
			if sec.Form == graph.FormWhole {
				if update := s.updateSection(); len(update.Phases) > 0 {
					sections = append(sections, update)
				}
			}
			continue
		}
		for j := range sec.Phases {
			w := graph.NewEditor(&sec.Phases[j])
			s.unshard(w, sec.Name)
			s.observeLoss(w, true, true)
			w.Commit()
		}
		sections = append(sections, *sec)
	}
	q.Sections = sections
	s.finish()
	return q, nil
}

type unitBufs struct {
	value, grad, reduced graph.BufID // as in the package's note; NoBuf where absent
	valueShard           graph.BufID // the rank's own part of value
	master               graph.BufID // f32 parameters of that part, where value has 16 bits
	gradShard            graph.BufID // the rank's own part of the reduced gradient
	wire                 graph.BufID // 16-bit copy in which an f32 sum over micro-steps travels, whole or the rank's part
	update               graph.BufID // the gradient that the update reads
	states               []graph.BufID
	scales               []graph.BufID // of states in 8 bits, in the order of states
	extra                graph.BufID   // gradients of a later micro-step before they are added (reproducible)
}

type sharder struct {
	p     *graph.Program
	o     Options
	ranks int // along the shard axis
	units []unitBufs

	replicas  int // along the other axis, 1 where there is none
	replicate int // that axis, −1

	gathered map[gatherKey]*gathered
	extra    map[graph.BufID]graph.BufID // gradient view → its twin in a unit's extra
}

func (s *sharder) shardLen(u int) int64 { return s.p.Units[u].FlatLen / int64(s.ranks) }

// part returns the attribute of what a rank holds of unit u.
func (s *sharder) part(u int, sharded bool) graph.ShardAttr {
	if sharded {
		return graph.ShardAttr{Unit: u, Axis: s.o.Axis, Len: s.shardLen(u)}
	}
	return graph.ShardAttr{Unit: u, Axis: -1, Len: s.p.Units[u].FlatLen}
}

// shardBuffer is a rank's part of a flat buffer of unit u, padding counted as
// the mean over ranks.
func (s *sharder) shardBuffer(name string, dtype graph.DType, class graph.Class, life graph.Life, u int, sharded bool) graph.Buffer {
	used := usedElems(&s.p.Units[u])
	n := s.p.Units[u].FlatLen
	global := n
	var place graph.Placement
	if sharded {
		n = s.shardLen(u)
		used = s.share(u, class)
		place = graph.Sharded
	}
	b := flatBuffer(name, dtype, class, life, u, n, used)
	b.Global = []int64{global}
	b.Place = make([]graph.Placement, len(s.p.Mesh))
	b.Place[s.o.Axis] = place
	return b
}

// addState makes one of the optimizer's flat states of a unit: f32, or values in 8
// bits and their scales, whose blocks no shard cuts.
func (s *sharder) addState(name string, u int) (buf, scales graph.BufID, err error) {
	b := s.shardBuffer(name+"/"+s.p.Units[u].Name, graph.F32, graph.Optimizer, graph.LifeRun, u, s.o.Stage.ShardsStates())
	if !s.o.Optimizer.Int8 {
		return s.p.AddBuffer(b), graph.NoBuf, nil
	}
	used := b.Elems() - b.Pad/b.DType.Size()
	blocks := func(n int64) int64 { return (n + graph.QuantBlock - 1) / graph.QuantBlock }
	b.DType = graph.U8
	b.Pad = b.Elems() - used + (blocks(b.Elems())-blocks(used))*graph.F32.Size()
	return s.p.AddQuantized(b, graph.QuantBlock)
}

// share is what of unit u's elements a rank holds in the mean over ranks. It is
// rounded up along the units' running sum, so that a class's units add up to
// ⌈Ψ/N⌉, the formula of ZeRO for the whole model: rounded one by one they would
// exceed it by up to an element a unit.
func (s *sharder) share(u int, class graph.Class) int64 {
	var before int64
	for v := range u {
		// Parameters are everybody's; gradients and states the trainable units' only.
		if class == graph.Parameters || !s.p.Units[v].Frozen {
			before += usedElems(&s.p.Units[v])
		}
	}
	ceil := func(n int64) int64 { return (n + int64(s.ranks) - 1) / int64(s.ranks) }
	return ceil(before+usedElems(&s.p.Units[u])) - ceil(before)
}

// own returns the view of the rank's own part of a whole flat buffer.
func (s *sharder) own(flat graph.BufID, u int) graph.BufID {
	f := s.p.Buf(flat)
	n := s.shardLen(u)
	return s.p.AddBuffer(graph.Buffer{Name: f.Name + "/own", DType: f.DType, Shape: []int64{n}, Space: f.Space, Class: f.Class, Life: f.Life, Unit: u,
		View: &graph.View{Base: flat, RankStride: n * f.DType.Size(), Axis: s.o.Axis}})
}

// allocate makes the resident buffers of every unit.
func (s *sharder) allocate() error {
	p, o := s.p, s.o
	gradBase := map[int]graph.BufID{}
	for i := range p.Buffers {
		if v := p.Buffers[i].View; v != nil && p.Buf(v.Base).Class == graph.Gradients && p.Buf(v.Base).Unit >= 0 {
			gradBase[p.Buf(v.Base).Unit] = v.Base
		}
	}
	flat, perParam := o.Optimizer.StateNames()
	for u := range p.Units {
		unit := &p.Units[u]
		b := noBufs
		if unit.FlatLen == 0 {
			s.units[u] = b
			continue
		}
		b.value = unit.Value.Buf
		dtype := p.Buf(b.value).DType
		switch {
		case o.Stage.ShardsParams():
			b.valueShard = p.AddBuffer(s.shardBuffer("shard/"+unit.Name, dtype, graph.Parameters, graph.LifeRun, u, true))
			unit.Value = graph.State{Name: "value", Buf: b.valueShard, Axis: o.Axis, Len: s.shardLen(u)}
		case o.Stage.ShardsStates():
			b.valueShard = s.own(b.value, u)
		default:
			b.valueShard = b.value
		}
		if g, ok := gradBase[u]; ok {
			b.grad = g
			if err := s.allocateGrads(u, &b); err != nil {
				return err
			}
			if dtype != graph.F32 {
				s.allocateMaster(u, &b)
			}
			for _, name := range flat {
				id, scales, err := s.addState(name, u)
				if err != nil {
					return err
				}
				b.states = append(b.states, id)
				if scales != graph.NoBuf {
					b.scales = append(b.scales, scales)
				}
				part := s.part(u, o.Stage.ShardsStates())
				unit.States = append(unit.States, graph.State{Name: name, Buf: id, Axis: part.Axis, Len: part.Len})
			}
			for _, name := range perParam {
				n := int64(len(unit.Segments))
				id := p.AddBuffer(graph.Buffer{Name: name + "/" + unit.Name, DType: graph.F32, Shape: []int64{n}, Class: graph.Optimizer, Life: graph.LifeRun, Unit: u})
				b.states = append(b.states, id)
				unit.States = append(unit.States, graph.State{Name: name, Buf: id, Axis: -1, Len: n, PerParam: true})
			}
		}
		s.units[u] = b
	}
	return nil
}

func newOp(kind graph.Kind, name string, stream graph.StreamID, pass graph.Pass, unit int, in []graph.BufID, out []graph.Out, attr any) graph.Op {
	return graph.Op{Kind: kind, Name: name, In: in, Out: out, Work: graph.NoBuf, Skip: graph.NoBuf, Attr: attr, Stream: stream, Pass: pass, Unit: unit}
}

func (s *sharder) group() graph.GroupAttr { return graph.GroupAttr{Axis: s.o.Axis} }

// initSection gives the optimizer states, and the padding of parameters, their
// first values; the host writes the parameters themselves afterwards.
func (s *sharder) initSection() graph.Section {
	var ops []graph.Op
	fill := func(id graph.BufID, u int) {
		ops = append(ops, newOp(graph.Fill, s.p.Buf(id).Name+"/zero", graph.Compute, graph.Update, u, nil, []graph.Out{{Buf: id}}, graph.FillAttr{}))
	}
	for u := range s.p.Units {
		if s.p.Units[u].FlatLen == 0 {
			continue
		}
		fill(s.p.Units[u].Value.Buf, u)
		for _, id := range s.units[u].states {
			root, _ := s.p.Resolve(id, nil) // with the scales of one in 8 bits
			fill(root, u)
		}
	}
	ops = append(ops, s.initScale()...)
	return graph.NewSection(graph.SectionInit, graph.FormWhole, graph.Phase{Name: "init", Repeat: 1, Ops: ops})
}

// stepSection expands a micro-batch into the phases of a step in the same form.
func (s *sharder) stepSection(train *graph.Section) graph.Section {
	sec := graph.NewSection(graph.SectionStep, train.Form)
	phase := func(name string, repeat int, first, last bool) {
		ph := graph.Phase{Name: name, Kind: graph.MicroPhase, First: first, Last: last, Repeat: repeat, Ops: train.Phases[0].Ops}
		w := graph.NewEditor(&ph)
		s.reduceGrads(w, first, last)
		s.unshard(w, train.Name)
		s.observeLoss(w, first, last)
		w.Commit()
		sec.Phases = append(sec.Phases, ph)
	}
	switch k := s.o.Accum; k {
	case 1:
		phase("only", 1, true, true)
	default:
		phase("first", 1, true, false)
		if k > 2 {
			phase("middle", k-2, false, false)
		}
		phase("last", 1, false, true)
	}
	return sec
}

// updateSection returns the update of all trainable units, in parts that have no
// place yet: that is for the pass which knows where it runs. It is empty where
// nothing is trained.
func (s *sharder) updateSection() graph.Section {
	var targets []zero.Target
	for u := range s.p.Units {
		b := s.units[u]
		if b.gradShard == graph.NoBuf {
			continue
		}
		t := zero.Target{Unit: u, Name: s.p.Units[u].Name, Shard: s.part(u, s.o.Stage.ShardsStates()), Grad: b.update, Value: b.valueShard, States: b.states, Scales: b.scales, Low: graph.NoBuf}
		if b.master != graph.NoBuf {
			t.Value, t.Low = b.master, b.valueShard
		}
		if s.o.Stage.ShardsStates() && !s.o.Stage.ShardsParams() {
			t.After = []graph.Op{newOp(graph.AllGather, t.Name+"/all_gather", graph.Comm, graph.Update, u,
				[]graph.BufID{b.valueShard}, []graph.Out{{Buf: b.value}}, s.group())}
		}
		targets = append(targets, t)
	}
	if len(targets) == 0 {
		return graph.Section{}
	}
	sec := s.o.Optimizer.Section(s.p, targets, s.o.Clip)
	ph := graph.Phase{Name: "out", Kind: graph.UpdateOut, Repeat: 1}
	w := graph.NewEditor(&ph)
	if host := s.p.Port(graph.PortGradNorm); host != graph.NoBuf {
		w.Append(graph.NewCopy("grad_norm/out", s.p.GradNorm, host, graph.CopyOut, graph.Update, -1))
	}
	s.observeScale(w)
	w.Commit()
	sec.Phases = append(sec.Phases, ph)
	return sec
}

// observeLoss zeroes the loss at the start of a step, sums it over the ranks at
// its end and copies it to the host.
func (s *sharder) observeLoss(w *graph.Editor, first, last bool) {
	p := s.p
	if p.Loss == graph.NoBuf || !writes(w, p.Loss) {
		return
	}
	if first {
		w.Before(0, newOp(graph.Fill, "loss/zero", graph.Compute, graph.Forward, -1, nil, []graph.Out{{Buf: p.Loss}}, graph.FillAttr{}))
	}
	if !last {
		return
	}
	if p.WorldSize() > 1 {
		w.Append(newOp(graph.AllReduce, "loss/all_reduce", graph.Comm, graph.Forward, -1, nil, []graph.Out{{Buf: p.Loss, Mode: graph.ReadWrite}}, graph.GroupAttr{Axis: -1}))
	}
	if host := p.Port(graph.PortLoss); host != graph.NoBuf {
		w.Append(graph.NewCopy("loss/out", p.Loss, host, graph.CopyOut, graph.Forward, -1))
	}
}

func writes(w *graph.Editor, id graph.BufID) bool {
	for _, n := range w.Base {
		for _, o := range n.Op.Out {
			if o.Buf == id {
				return true
			}
		}
	}
	return false
}

// finish drops what the rewrite left without use: whole values and gradients
// of sharded units are no longer anybody's.
func (s *sharder) finish() {
	if !s.o.Stage.ShardsParams() {
		return
	}
	for i := range s.p.Params {
		s.p.Params[i].Value = graph.NoBuf
	}
}
