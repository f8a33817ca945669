package fsdp

import (
	"fmt"
	"iter"
	"slices"
	"strconv"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/zero"
)

// Options of the sharding rewrite.
type Options struct {
	Stage        zero.Stage
	Axis         int               // mesh axis to shard over; along the other axis, if any, ranks hold replicas
	Accum        int               // rounds of micro-batches in a step, at least 1
	InLayers     bool              // layer order: one phase runs all micro-batches, and its backward accumulates their gradients
	Reproducible bool              // sums go leaf by leaf (graph.Gradient), so their bits do not depend on stage and number of ranks
	Shares       []int             // by rank: micro-batches in a step, at most Accum (Reproducible only); nil: Accum on every rank
	Shapes       []graph.StepShape // all shapes of steps, that of Accum and Shares first; nil: only that one
	Prefetch     int               // how many stretches of use ahead parameters are gathered; 0: none
	Optimizer    zero.Optimizer
	Clip         float64 // largest global gradient norm; 0: off
	Reduce32     bool    // gradients of 16-bit parameters are sent and stored in f32
	Noise        bool    // with sums leaf by leaf, the squares of the leaves are summed too
	Int8Gather   bool    // parameters with a master are gathered, and used, in quantised form
	Int8Reduce   bool    // gradients are sent quantised along the shard axis
	Base         Base    // type in which frozen units are stored
}

// Validate returns an error if an option is out of range or contradicts the program.
func (o Options) Validate(p *graph.Program) error {
	if o.Axis < 0 || o.Axis >= len(p.Mesh) {
		return fmt.Errorf("fsdp: shard axis %d of a mesh of %d axes", o.Axis, len(p.Mesh))
	}
	if _, err := o.replicas(p); err != nil {
		return err
	}
	if replicas := p.DataRanks() / p.Mesh[o.Axis].Size; o.Reproducible && replicas > 1 {
		return fmt.Errorf("fsdp: reproducible sums over shards of %d ranks in %d replicas: the order of the sum would depend on the mesh; shard over all ranks", p.Mesh[o.Axis].Size, replicas)
	}
	if o.Accum < 1 {
		return fmt.Errorf("fsdp: %d micro-steps a step; at least 1 is needed", o.Accum)
	}
	if err := o.validateShares(p); err != nil {
		return err
	}
	for _, shape := range o.Shapes {
		of := o
		of.Accum, of.Shares = shape.Rounds, shape.Shares
		if err := of.validateShares(p); err != nil {
			return err
		}
		if shape.Rounds < 1 || shape.Rounds > o.Accum || o.InLayers {
			return fmt.Errorf("fsdp: steps of %d rounds beside those of %d, in layer order: %v; want at least 1, no more than the first, and micro order", shape.Rounds, o.Accum, o.InLayers)
		}
	}
	if o.Prefetch < 0 {
		return fmt.Errorf("fsdp: prefetch distance %d is negative", o.Prefetch)
	}
	if err := o.validateInt8(p); err != nil {
		return err
	}
	return o.Optimizer.Validate()
}

// replicas returns the mesh axis along which ranks hold replicas; −1 for none.
func (o Options) replicas(p *graph.Program) (axis int, err error) {
	axis = -1
	for i, a := range p.Mesh {
		switch {
		case i == o.Axis || a.Name == graph.TensorAxis || a.Name == graph.PipelineAxis:
		case axis >= 0:
			return -1, fmt.Errorf("fsdp: a mesh of %d axes; one to shard over and one of replicas are the most", len(p.Mesh))
		default:
			axis = i
		}
	}
	return axis, nil
}

// validateShares returns an error if the shares do not fit the ranks and rounds.
func (o Options) validateShares(p *graph.Program) error {
	switch {
	case o.Shares == nil:
	case !o.Reproducible:
		return fmt.Errorf("fsdp: uneven shares %v: only reproducible sums leave out ranks without a micro-batch", o.Shares)
	case len(o.Shares) != p.DataRanks() || slices.Min(o.Shares) < 1 || slices.Max(o.Shares) != o.Accum:
		return fmt.Errorf("fsdp: shares %v of %d ranks and %d rounds: each rank needs a share of at least 1 micro-batch, and the largest share must be the number of rounds", o.Shares, p.DataRanks(), o.Accum)
	}
	return nil
}

type unitBufs struct {
	value      graph.BufID // the whole value, as in the package's note
	valueShard graph.BufID // the rank's own part of value
	master     graph.BufID // f32 parameters of that part, if value has 16 bits; else NoBuf
	states     []graph.BufID
	scales     []graph.BufID // by state: scales of a state in 8 bits
}

type sharder struct {
	p     *graph.Program
	o     Options
	ranks int // number of ranks along the shard axis
	units []unitBufs

	losses leafLosses

	squares graph.BufID // exact sum of the squares of this rank's parts of the leaves; NoBuf if not summed

	replicas  int // along the other axis, 1 where there is none
	replicate int // that axis; −1 where nothing is replicated, as along a tensor axis
}

// stage returns the stage of a unit: a unit that stays whole is laid out as at stage 0.
func (s *sharder) stage(u int) zero.Stage {
	if whole(&s.p.Units[u], s.ranks) {
		return zero.Replicate
	}
	return s.o.Stage
}

func (s *sharder) shardLen(u int) int64 { return s.p.Units[u].FlatLen / int64(s.ranks) }

// part returns the attribute for the part of unit u that a rank holds.
func (s *sharder) part(u int, sharded bool) graph.ShardAttr {
	if sharded {
		return graph.ShardAttr{Unit: u, Axis: s.o.Axis, Len: s.shardLen(u)}
	}
	return graph.ShardAttr{Unit: u, Axis: -1, Len: s.p.Units[u].FlatLen}
}

// shardBuffer returns a rank's part of a flat buffer of unit u. Its padding is the mean over the
// ranks.
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

func newOp(kind graph.Kind, name string, stream graph.StreamID, pass graph.Pass, unit int, in []graph.BufID, out []graph.Out, attr any) graph.Op {
	return graph.Op{Kind: kind, Name: name, In: in, Out: out, Work: graph.NoBuf, Skip: graph.NoBuf, Attr: attr, Stream: stream, Pass: pass, Unit: unit}
}

func (s *sharder) group() graph.GroupAttr { return graph.GroupAttr{Axis: s.o.Axis} }

// rounds are consecutive rounds in which the same ranks have a micro-batch.
type rounds struct{ first, repeat int }

// runs divides rounds [from, to) where the set of ranks with a micro-batch changes, and names the
// parts.
func runs(shares []int, name string, from, to int) iter.Seq2[string, rounds] {
	return func(yield func(string, rounds) bool) {
		for first := from; first < to; {
			end := first + 1
			for end < to && len(graph.PresentIn(shares, end)) == len(graph.PresentIn(shares, first)) {
				end++
			}
			part := name
			if first > from {
				part += "." + strconv.Itoa(first)
			}
			if !yield(part, rounds{first, end - first}) {
				return
			}
			first = end
		}
	}
}

// validateInt8 returns an error if the options ask to quantise what cannot be quantised.
func (o Options) validateInt8(p *graph.Program) error {
	if o.Int8Gather && o.Optimizer.BF16 {
		return fmt.Errorf("fsdp: a quantised gather needs masters, and states in bf16 have none")
	}
	for i := range p.Params {
		q := &p.Params[i]
		if o.Int8Gather && !q.Frozen && p.Buf(q.Value).DType == graph.F32 {
			return fmt.Errorf("fsdp: parameter %q is f32, and a quantised gather needs a master beside what the model computes with", q.Name)
		}
	}
	return nil
}

// leafLosses has the buffers of a loss that is summed leaf by leaf, one micro-batch on one rank
// after another.
type leafLosses struct {
	leaf  graph.BufID // F64 (n), n as the model's loss has: this rank's of a micro-batch; NoBuf where losses go another way
	ranks graph.BufID // F64 (n·W): all ranks', NoBuf of one rank
	sum   graph.BufID // F64 (n): of the micro-batches so far, on every rank
}

// share returns how many of unit u's elements a rank holds, as the mean over ranks. It is rounded
// up along the running sum over units, so that the units of a class add up to ⌈Ψ/N⌉, the ZeRO
// formula for the whole model. If each were rounded up separately, the sum would be larger by up
// to an element a unit.
func (s *sharder) share(u int, class graph.Class) int64 {
	var before int64
	for v := range u {
		// All units have parameters; only trained units have gradients and states.
		if whole(&s.p.Units[v], s.ranks) {
			continue
		}
		if class == graph.Parameters || !s.p.Units[v].Frozen {
			before += usedElems(&s.p.Units[v])
		}
	}
	ceil := func(n int64) int64 { return (n + int64(s.ranks) - 1) / int64(s.ranks) }
	return ceil(before+usedElems(&s.p.Units[u])) - ceil(before)
}

// own returns a view of the rank's own part of a whole flat buffer.
func (s *sharder) own(flat graph.BufID, u int) graph.BufID {
	return ownPart(s.p, flat, u, s.o.Axis)
}

// leaves says whether gradients are summed leaf by leaf. With a single leaf there is no sum.
func (o Options) leaves(shards int) bool { return o.Reproducible && o.Accum*shards > 1 }
