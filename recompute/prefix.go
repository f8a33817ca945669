package recompute

import (
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/graph"
)

// CachePrefix returns the program with a second form of section "train", FormCached. It leaves out
// the prefix: the first operations, as long as they depend on no trained parameter. Both forms
// share a host buffer, PortPrefix, for the one value x that the rest reads from the prefix:
//
//	train:         x = …frozen…;  host ← x;  y = block(x); …
//	train-cached:  x ← host;                 y = block(x); …
//
// The host caches x by sample, and runs the second form if it has x for every row. The bits are the
// same, because x depends only on the sample. rows is the number of rows of a micro-batch, the
// leading dimension of x.
//
// If the rest reads several values of the frozen operations, the prefix ends earlier, at the last
// place with only one such value. (An attention whose output projection is trained also passes on
// its residual.) It is an error if the first operation is not frozen, or if there is dropout before
// the first trained operation, since its mask differs each time.
func CachePrefix(p *graph.Program, rows int64) (*graph.Program, error) {
	q := p.Clone()
	train := q.SectionOf(graph.SectionTrain, graph.FormWhole)
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

// frozenBeginning returns the number of operations at the start that depend only on the sample and
// on frozen parameters.
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

// trainedBehind says whether the first operation that reads the output of ops[0] also reads a
// trained parameter. An adapter's dropout is an example of such an ops[0].
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

// handedOn returns the root buffers that operations in first write and that operations in rest read
// before overwriting them.
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
				state[r] = done // completely overwritten
			}
		}
	}
	return live
}
