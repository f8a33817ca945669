package recompute

import (
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// CachePrefix returns the program with a second form of section "train",
// FormCached, without the operations at its beginning that depend on nothing that
// is trained. Both share a host buffer, PortPrefix, for the one value x that these hand on:
//
//	train:         x = …frozen…;  host ← x;  y = block(x); …
//	train-cached:  x ← host;                 y = block(x); …
//
// The host keeps x by sample, and runs the second form where it has x of every
// row. The bits are the same: x depends on the sample alone. rows is the
// rows of a micro-batch, which x has as its leading dimension.
//
// Where the frozen beginning hands on several values (an attention whose output
// projection is trained hands on its residual too), it ends at the last place
// before with one. It fails where nothing at the beginning is frozen, and where
// there is dropout, which is another mask each time, before anything is trained.
func CachePrefix(p *graph.Program, rows int64) (*graph.Program, error) {
	q := p.Clone()
	train := q.SectionOf(graph.SectionTrain, graph.FormWhole)
	if train.Micro() == nil {
		return nil, fmt.Errorf("cache of the frozen beginning: the program has no section \"train\" of one phase")
	}
	ops := train.Phases[0].Ops
	n, err := frozenBeginning(q, ops)
	if err != nil {
		return nil, err
	}
	x := graph.NoBuf
	for ; n > 0; n-- {
		live := handedOn(q, ops[:n], ops[n:])
		if len(live) == 1 && q.Buf(live[0]).Bytes()%rows == 0 && q.Buf(live[0]).Shape[0]%rows == 0 {
			x = live[0]
			break
		}
	}
	if x == graph.NoBuf {
		return nil, fmt.Errorf("cache of the frozen beginning: the model's first operation, %s, is trained or feeds several; freeze the embeddings and the blocks that follow them", ops[0].Name)
	}
	b := q.Buf(x)
	host := q.AddBuffer(graph.Buffer{Name: "host/prefix", Port: graph.PortPrefix, DType: b.DType, Shape: append([]int64(nil), b.Shape...), Space: graph.Host, Class: graph.Activations, Life: graph.LifeRun, Unit: -1})
	rest := ops[n:]
	cached := append([]graph.Op{graph.NewCopy("prefix/in", host, x, graph.CopyIn, graph.Forward, -1)}, graph.CloneOps(rest)...)
	whole := append(append(graph.CloneOps(ops[:n]), graph.NewCopy("prefix/out", x, host, graph.CopyOut, graph.Forward, -1)), graph.CloneOps(rest)...)
	ph := train.Phases[0]
	train.Phases[0].Ops = whole
	ph.Ops = cached
	q.Sections = append(q.Sections, graph.NewSection(graph.SectionTrain, graph.FormCached, ph))
	return q, nil
}

// frozenBeginning returns how many of the first operations depend on the sample
// and frozen parameters only.
func frozenBeginning(p *graph.Program, ops []graph.Op) (int, error) {
	fixed := map[graph.BufID]bool{}
	root := func(id graph.BufID) graph.BufID { r, _ := p.Resolve(id, nil); return r }
	if p.Tokens != graph.NoBuf {
		fixed[root(p.Tokens)] = true
	}
	for i := range p.Buffers {
		if p.Buffers[i].IsFloatInput() {
			fixed[graph.BufID(i)] = true
		}
	}
	for i := range p.Params {
		if p.Params[i].Frozen {
			fixed[root(p.Params[i].Value)] = true
		}
	}
	for i := range ops {
		op := &ops[i]
		random, varies := false, false
		read := func(id graph.BufID) {
			switch {
			case id == graph.NoBuf || fixed[root(id)]:
			case id == p.Key:
				random = true
			default:
				varies = true
			}
		}
		for _, id := range op.In {
			read(id)
		}
		for _, o := range op.Out {
			if o.Mode != graph.Write {
				read(o.Buf)
			}
		}
		switch {
		case varies || op.Pass != graph.Forward || random && trainedBehind(p, ops[i:]):
			return i, nil
		case random:
			return 0, fmt.Errorf("cache of the frozen beginning: %s is dropout, another mask each time; train without dropout, or without the cache", op.Name)
		}
		for _, o := range op.Out {
			if o.Buf != graph.NoBuf {
				fixed[root(o.Buf)] = true
			}
		}
	}
	return len(ops), nil
}

// trainedBehind says whether what the first operation writes is first read beside a trained
// parameter, as an adapter's dropout is.
func trainedBehind(p *graph.Program, ops []graph.Op) bool {
	for i := range ops[1:] {
		in := ops[1+i].In
		if !slices.Contains(in, ops[0].Out[0].Buf) {
			continue
		}
		return slices.ContainsFunc(p.Params, func(q graph.Param) bool { return !q.Frozen && slices.Contains(in, q.Value) })
	}
	return false
}

// handedOn returns the root buffers that first writes and rest reads before it
// writes them anew.
func handedOn(p *graph.Program, first, rest []graph.Op) []graph.BufID {
	const (
		written = 1 + iota
		done
	)
	state := map[graph.BufID]int{}
	for i := range first {
		for _, o := range first[i].Out {
			if o.Buf != graph.NoBuf {
				r, _ := p.Resolve(o.Buf, nil)
				state[r] = written
			}
		}
	}
	var live []graph.BufID
	use := func(id graph.BufID) {
		if id == graph.NoBuf {
			return
		}
		if r, _ := p.Resolve(id, nil); state[r] == written {
			state[r] = done
			live = append(live, r)
		}
	}
	for i := range rest {
		for _, id := range rest[i].In {
			use(id)
		}
		for _, o := range rest[i].Out {
			if o.Buf == graph.NoBuf {
				continue
			}
			r, _ := p.Resolve(o.Buf, nil)
			if o.Mode != graph.Write {
				use(o.Buf)
			} else if r == o.Buf {
				state[r] = done // written whole
			}
		}
	}
	return live
}
