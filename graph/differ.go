package graph

import (
	"fmt"
	"slices"
)

// differ does reverse-mode differentiation of one straight line of operations.
//
// A buffer can hold several values one after another, since an operation in place gives it
// a new one. Each value has a number, and a gradient belongs to a value, not to a buffer.
type differ struct {
	p     *Program
	fwd   []Op
	bwd   []Op
	ins   [][]int // value number by forward operation and input, −1 for none
	outs  [][]int
	vals  []value
	names map[string]bool // of buffers and of operations ("op " before)

	current map[BufID]int // root buffer → its last value
	grads   map[BufID]int // root gradient buffer → values that hold it
	views   map[[2]BufID]BufID
	nFwd    BufID // buffers from this ID on were added by this pass

	// The forward operation that is differentiated now.
	i       int
	op      *Op
	inPlace bool // its gradient runs at its place in the forward, not after the complete forward
	err     error
	seedBuf BufID
}

// value is one content of a root buffer.
type value struct {
	root  BufID
	param int  // index into Program.Params, −1 for none
	needs bool // its gradient is needed: a trainable parameter contributes to it
	stat  bool
	grad  BufID // root gradient buffer so far; NoBuf for none
	open  int   // slots that were opened and not yet closed
	begun bool  // for a parameter: its gradient has been written, later ones accumulate
}

func (d *differ) failf(format string, args ...any) {
	if d.err == nil {
		d.err = fmt.Errorf("graph: differentiate %s (%s): %s", d.op.Name, d.op.Kind, fmt.Sprintf(format, args...))
	}
}

// at makes forward operation i the current one.
func (d *differ) at(i int) { d.i, d.op, d.inPlace = i, &d.fwd[i], false }

// in and out return input j and output k of the current operation.
func (d *differ) in(j int) BufID  { return d.op.in(j) }
func (d *differ) out(k int) BufID { return d.op.out(k) }

// needs says whether input j needs a gradient.
func (d *differ) needs(j int) bool {
	return j < len(d.ins[d.i]) && d.ins[d.i][j] >= 0 && d.vals[d.ins[d.i][j]].needs
}

// newValue adds a value, the last one of its root buffer, and returns its number.
func (d *differ) newValue(v value) int {
	d.vals = append(d.vals, v)
	n := len(d.vals) - 1
	d.current[v.root] = n
	return n
}

// hold makes g the gradient of value v.
func (d *differ) hold(v int, g BufID) {
	d.drop(v)
	d.vals[v].grad = g
	d.grads[g]++
}

// drop releases the gradient that a value holds.
func (d *differ) drop(v int) {
	if g := d.vals[v].grad; g != NoBuf {
		d.grads[g]--
		d.vals[v].grad = NoBuf
	}
}

// sole says whether the gradient buffer may be overwritten: no value holds it, or only the
// current operation does and uses it for the last time.
func (d *differ) sole(root BufID) bool {
	if root == d.seedBuf {
		return false
	}
	n := d.grads[root]
	for _, v := range d.outs[d.i] {
		if v >= 0 && d.vals[v].grad == root {
			n--
		}
	}
	return n <= 0
}

// buffer adds a buffer and makes its name unique.
func (d *differ) buffer(name string, b Buffer) BufID {
	b.Name = d.unique(name, "")
	b.Shape = slices.Clone(b.Shape)
	return d.p.AddBuffer(b)
}

// unique returns name, or name with a number appended if name is taken.
func (d *differ) unique(name, space string) string {
	n := name
	for i := 2; d.names[space+n]; i++ {
		n = fmt.Sprintf("%s.%d", name, i)
	}
	d.names[space+n] = true
	return n
}

// hyper returns the program's Hyper buffer, which it adds if there is none.
func (d *differ) hyper() BufID {
	if d.p.Hyper == NoBuf {
		d.p.Hyper = d.buffer("hyper", Buffer{DType: F64, Shape: []int64{NumHyper}, Class: Inputs, Life: LifeStep, Unit: -1})
	}
	return d.p.Hyper
}

// gradBuffer returns a new gradient buffer for value n, with the shape of buffer like.
func (d *differ) gradBuffer(n int, like BufID) BufID {
	root := &d.p.Buffers[d.vals[n].root]
	return d.buffer(root.Name+".grad", Buffer{DType: F32, Shape: d.p.Buffers[like].Shape, Space: root.Space, Class: Activations, Unit: root.Unit})
}

// as returns gradient g in the shape of buffer like: g itself or a view of it.
func (d *differ) as(g, like BufID) BufID {
	if slices.Equal(d.p.Buffers[g].Shape, d.p.Buffers[like].Shape) {
		return g
	}
	key := [2]BufID{g, like}
	v, ok := d.views[key]
	if !ok {
		b := d.p.Buffers[g]
		v = d.buffer(b.Name+".view", Buffer{
			DType: b.DType, Shape: d.p.Buffers[like].Shape, Space: b.Space, Class: b.Class, Life: b.Life, Unit: b.Unit, View: &View{Base: g},
		})
		d.views[key] = v
	}
	return v
}
