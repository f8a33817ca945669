package memplan

import (
	"fmt"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/progtext"
)

// synth builds programs for tests with the memory traffic of a training step. The operations' names
// say what they do, but their kinds accept any operands.
type synth struct {
	p   *graph.Program
	ops []graph.Op
}

func newSynth(ranks int) *synth {
	p, err := progtext.Parse(fmt.Sprintf("spillway program v1\nmesh data=%d\n", ranks))
	if err != nil {
		panic(err)
	}
	return &synth{p: p}
}

func (s *synth) buf(name string, bytes int64, class graph.Class, life graph.Life) graph.BufID {
	return s.p.AddBuffer(graph.Buffer{Name: name, DType: graph.U8, Shape: []int64{bytes}, Class: class, Life: life, Unit: -1})
}

func (s *synth) op(stream graph.StreamID, name string, in []graph.BufID, out ...graph.Out) int {
	s.ops = append(s.ops, graph.Op{Kind: graph.Copy, Name: name, In: in, Out: out, Work: graph.NoBuf, Skip: graph.NoBuf, Stream: stream, Unit: -1})
	return len(s.ops) - 1
}

func (s *synth) work(bytes int64) {
	op := &s.ops[len(s.ops)-1]
	op.Work = s.buf(op.Name+"/work", bytes, graph.Workspace, graph.LifePhase)
}

// barrier makes every stream wait for all others.
func (s *synth) barrier(name string) {
	var events []graph.EventID
	for st := range graph.NumStreams {
		i := s.op(st, fmt.Sprintf("%s/%v/reach", name, st), nil)
		s.ops[i].Kind = graph.Join
		s.ops[i].Record = s.p.NewEvent()
		events = append(events, s.ops[i].Record)
	}
	for st := range graph.NumStreams {
		i := s.op(st, fmt.Sprintf("%s/%v/leave", name, st), nil)
		s.ops[i].Kind = graph.Join
		s.ops[i].Wait = events
	}
}

func (s *synth) phase(section, name string, repeat int, orders []graph.Order) {
	graph.Synchronize(s.p, s.ops, orders)
	s.barrier("end")
	sec := s.p.Section(section)
	if sec == nil {
		s.p.Sections = append(s.p.Sections, graph.Section{Name: section})
		sec = s.p.Section(section)
	}
	sec.Phases = append(sec.Phases, graph.Phase{Name: name, Repeat: repeat, Ops: s.ops})
	s.ops = nil
}

func w(id graph.BufID) graph.Out   { return graph.Out{Buf: id} }
func acc(id graph.BufID) graph.Out { return graph.Out{Buf: id, Mode: graph.Accum} }
func rw(id graph.BufID) graph.Out  { return graph.Out{Buf: id, Mode: graph.ReadWrite} }
func ins(ids ...graph.BufID) []graph.BufID {
	return ids
}

// Transformer is a step of a GPT-like model at ZeRO stage 3: per layer one
// unit, gathered before its forward and again before its backward, prefetch
// units ahead; activations kept unless recompute is set; gradients scattered as
// each unit's backward ends; micros micro-steps, then an update.
func Transformer(layers int, width, rows, vocab int64, ranks, prefetch, micros int, recompute bool) *graph.Program {
	s := newSynth(ranks)
	run, step, phase := graph.LifeRun, graph.LifeStep, graph.LifePhase
	unitBytes := func(u int) int64 {
		if u == 0 || u == layers+1 {
			return (vocab*width*4/int64(ranks) + 1023) / 1024 * 1024 * int64(ranks)
		}
		return ((12*width*width+13*width)*4/int64(ranks) + 1023) / 1024 * 1024 * int64(ranks)
	}
	units := layers + 2
	shard, m, v, gshard := make([]graph.BufID, units), make([]graph.BufID, units), make([]graph.BufID, units), make([]graph.BufID, units)
	for u := range units {
		n := unitBytes(u) / int64(ranks)
		shard[u] = s.buf(fmt.Sprintf("u.%d.shard", u), n, graph.Parameters, run)
		m[u] = s.buf(fmt.Sprintf("u.%d.m", u), n, graph.Optimizer, run)
		v[u] = s.buf(fmt.Sprintf("u.%d.v", u), n, graph.Optimizer, run)
		gshard[u] = s.buf(fmt.Sprintf("u.%d.gshard", u), n, graph.Gradients, step)
	}
	loss := s.buf("loss", 8, graph.Inputs, step)
	norm := s.buf("norm", 8, graph.Optimizer, step)
	micro := func(name string, repeat int, first bool) {
		tok := s.buf(name+"/tokens", rows*4, graph.Inputs, phase)
		s.op(graph.CopyIn, "tokens", nil, w(tok))
		var orders []graph.Order
		var uses []int // compute operations that begin a use of a unit, in order
		full := map[string]graph.BufID{}
		gather := func(pass string, u int) graph.BufID {
			key := fmt.Sprintf("%s/u.%d.full.%s", name, u, pass)
			if id, ok := full[key]; ok {
				return id
			}
			id := s.buf(key, unitBytes(u), graph.Unsharded, phase)
			full[key] = id
			g := s.op(graph.Comm, fmt.Sprintf("gather/%s/%d", pass, u), ins(shard[u]), w(id))
			if k := len(uses) - 1 - prefetch; k >= 0 {
				orders = append(orders, graph.Order{Before: uses[k], After: g})
			}
			return id
		}
		ahead := func(pass string, u, dir int) graph.BufID {
			for d := range prefetch + 1 {
				if t := u + dir*d; t >= 0 && t < units {
					gather(pass, t)
				}
			}
			return gather(pass, u)
		}
		act := func(l int, what string, width int64) graph.BufID {
			return s.buf(fmt.Sprintf("%s/h.%d.%s", name, l, what), rows*width*4, graph.Activations, phase)
		}
		type saved struct{ x, n1, qkv, att, lse, x2, n2, pre, hid graph.BufID }
		forward := func(l int, x, wt graph.BufID, tag string) (saved, graph.BufID) {
			k := saved{x: x}
			op := func(what string, in []graph.BufID, width int64) graph.BufID {
				id := act(l, what+tag, width)
				s.op(graph.Compute, fmt.Sprintf("h.%d.%s%s", l, what, tag), in, w(id))
				return id
			}
			k.n1 = op("ln1", ins(x, wt), width)
			uses = append(uses, len(s.ops)-1)
			k.qkv = op("qkv", ins(k.n1, wt), 3*width)
			k.att, k.lse = act(l, "att"+tag, width), act(l, "lse"+tag, width/64)
			s.op(graph.Compute, fmt.Sprintf("h.%d.att%s", l, tag), ins(k.qkv), w(k.att), w(k.lse))
			s.work(rows * 256)
			proj := op("proj", ins(k.att, wt), width)
			k.x2 = op("x2", ins(x, proj), width)
			k.n2 = op("ln2", ins(k.x2, wt), width)
			k.pre, k.hid = act(l, "pre"+tag, 4*width), act(l, "hid"+tag, 4*width)
			s.op(graph.Compute, fmt.Sprintf("h.%d.fc%s", l, tag), ins(k.n2, wt), w(k.hid), w(k.pre))
			out := op("down", ins(k.hid, wt), width)
			return k, op("out", ins(k.x2, out), width)
		}
		x := act(0, "embed", width)
		s.op(graph.Compute, "embed", ins(tok, ahead("fwd", 0, 1)), w(x))
		uses = append(uses, len(s.ops)-1)
		keep := make([]saved, layers)
		for l := range layers {
			keep[l], x = forward(l, x, ahead("fwd", l+1, 1), "")
		}
		// The head keeps its gathered parameters from forward to backward.
		head := ahead("fwd", layers+1, 1)
		dx := act(layers, "dx", width)
		dfull := func(u int) graph.BufID {
			return s.buf(fmt.Sprintf("%s/u.%d.dfull", name, u), unitBytes(u), graph.Unsharded, phase)
		}
		scatter := func(u int, d graph.BufID) {
			out := acc(gshard[u])
			if first {
				out = w(gshard[u])
			}
			s.op(graph.Comm, fmt.Sprintf("scatter/%d", u), ins(d), out)
		}
		d := dfull(layers + 1)
		lossOut := acc(loss)
		if first {
			lossOut = w(loss)
		}
		s.op(graph.Compute, "head", ins(x, head, tok), lossOut, w(dx), w(d))
		uses = append(uses, len(s.ops)-1)
		s.work(1024 * vocab * 4 / 16)
		scatter(layers+1, d)
		for l := layers - 1; l >= 0; l-- {
			wt := ahead("bwd", l+1, -1)
			k := keep[l]
			if recompute {
				k, _ = forward(l, k.x, wt, "/again")
			}
			d := dfull(l + 1)
			grad := func(what string, in []graph.BufID, width int64, weight bool) graph.BufID {
				id := act(l, what, width)
				out := []graph.Out{w(id)}
				if weight {
					out = append(out, rw(d))
				}
				s.op(graph.Compute, fmt.Sprintf("h.%d.%s", l, what), in, out...)
				return id
			}
			s.op(graph.Compute, fmt.Sprintf("h.%d.zero", l), nil, w(d))
			uses = append(uses, len(s.ops)-1)
			dhid := grad("dhid", ins(dx, wt, k.hid), 4*width, true)
			dpre := grad("dpre", ins(dhid, k.pre), 4*width, false)
			dn2 := grad("dn2", ins(dpre, wt, k.n2), width, true)
			dx2 := grad("dx2", ins(dx, dn2, k.x2, wt), width, true)
			datt := grad("datt", ins(dx2, wt, k.att), width, true)
			dqkv := grad("dqkv", ins(datt, k.qkv, k.att, k.lse), 3*width, false)
			dn1 := grad("dn1", ins(dqkv, wt, k.n1), width, true)
			dx = grad("dx", ins(dx2, dn1, k.x, wt), width, true)
			scatter(l+1, d)
		}
		d = dfull(0)
		s.op(graph.Compute, "embed/dw", ins(dx, tok), w(d))
		scatter(0, d)
		s.phase("step", name, repeat, orders)
	}
	micro("first", 1, true)
	if micros > 1 {
		micro("rest", micros-1, false)
	}
	s.op(graph.Compute, "norm/zero", nil, w(norm))
	for u := range units {
		s.op(graph.Compute, fmt.Sprintf("norm/%d", u), ins(gshard[u]), acc(norm))
	}
	for u := range units {
		s.op(graph.Compute, fmt.Sprintf("adam/%d", u), ins(gshard[u], norm), rw(shard[u]), rw(m[u]), rw(v[u]))
	}
	s.phase("step", "update", 1, nil)
	return s.p
}

// Assign analyses and places a program.
func Assign(p *graph.Program, opt Options) (*Layout, error) {
	a, err := Analyse(p)
	if err != nil {
		return nil, fmt.Errorf("memplan.Assign: %w", err)
	}
	return a.Assign(opt)
}

// Touched returns, by memory space, the end (offset + 1) of the highest byte that the
// program's operations and the host touch when every section runs, on the rank with index
// coord[a] along each mesh axis a. It is less than Peak if no operand of that rank covers the
// end of the topmost buffer. p and l must be Assign's argument and result.
func Touched(p *graph.Program, l *Layout, coord []int) [graph.NumSpaces]int64 {
	var top [graph.NumSpaces]int64
	touch := func(id graph.BufID) {
		root, off := p.Resolve(id, coord)
		space := p.Buf(root).Space
		top[space] = max(top[space], l.Offset[root]+off+p.Buf(id).Bytes())
	}
	for i := range p.Sections {
		for j := range p.Sections[i].Phases {
			ph := &p.Sections[i].Phases[j]
			for k := range ph.Ops {
				if ph.Repeat > 0 {
					graph.Effects(&ph.Ops[k], func(e graph.Effect) { touch(e.Buf) })
				}
			}
		}
	}
	for _, id := range p.HostBuffers() {
		touch(id)
	}
	return top
}
