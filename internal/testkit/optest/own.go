package optest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/interp"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
)

// CheckOwn checks a user-defined operation against its definition, on random float inputs of the
// given shapes. Its CPU kernel must match its fp64 reference, writing and accumulating. The kernel
// must write every output element and no input, and give the same bits in whatever order Parallel
// runs. Its derivative must match differences of the reference along random directions. The error
// says which condition fails.
func CheckOwn(op *graph.Operation, attr any, in [][]int64, seed uint64) error {
	def := op.Definition()
	if def.Reference == nil {
		return fmt.Errorf("operation %q has no reference to be held against", def.Kind)
	}
	for i := range def.In {
		if !slices.Contains(def.In[i].Types, graph.F32) {
			return fmt.Errorf("operation %q: input %s is no float, of which CheckOwn draws values", def.Kind, def.In[i].Name)
		}
	}
	c := &ownCheck{op: op, def: def, attr: attr, in: in, rng: rand.New(rand.NewPCG(seed, 30))}
	for _, accum := range []bool{false, true} {
		if accum && !slices.Contains(def.Out[0].Modes, graph.Accum) {
			continue
		}
		if err := c.kernel(accum); err != nil {
			return fmt.Errorf("operation %q: %w", def.Kind, err)
		}
	}
	if def.Derive == nil {
		return nil
	}
	if err := c.derivative(seed); err != nil {
		return fmt.Errorf("operation %q: %w", def.Kind, err)
	}
	return nil
}

type ownCheck struct {
	op   *graph.Operation
	def  *graph.Definition
	attr any
	in   [][]int64
	rng  *rand.Rand
}

// kernel runs the kernel and the reference on the same values.
func (c *ownCheck) kernel(accum bool) error {
	out, err := c.def.Shapes(c.attr, c.in)
	if err != nil {
		return err
	}
	values := make([][]float32, 0, len(c.in)+len(out))
	for _, s := range append(slices.Clone(c.in), out...) {
		v := make([]float32, elems(s))
		for i := range v {
			v[i] = float32(c.rng.NormFloat64())
		}
		values = append(values, v)
	}
	call := func(run func(n int, f func(int))) *graph.Call {
		k := &graph.Call{Attr: c.attr, Run: run}
		for i, s := range c.in {
			k.In = append(k.In, graph.Tensor{Shape: s, DType: graph.F32, F32: slices.Clone(values[i])})
		}
		for i, s := range out {
			t := graph.Tensor{Shape: s, DType: graph.F32, F32: slices.Clone(values[len(c.in)+i]), Accum: accum && slices.Contains(c.def.Out[i].Modes, graph.Accum)}
			if !t.Accum {
				for j := range t.F32 {
					t.F32[j] = float32(math.NaN())
				}
			}
			k.Out = append(k.Out, t)
		}
		if c.def.Work != nil {
			k.Work = make([]byte, c.def.Work(c.attr, c.in, out))
		}
		return k
	}
	one, other := call(nil), call(func(n int, f func(int)) {
		for i := n - 1; i >= 0; i-- {
			f(i)
		}
	})
	if err := c.def.CPU(one); err != nil {
		return err
	}
	if err := c.def.CPU(other); err != nil {
		return err
	}
	wide := call(nil)
	for _, list := range [][]graph.Tensor{wide.In, wide.Out} {
		for i := range list {
			list[i].F64 = as[float64](list[i].F32)
			list[i].F32 = nil
		}
	}
	if err := c.def.Reference(wide); err != nil {
		return fmt.Errorf("reference: %w", err)
	}
	for i := range one.In {
		if !slices.Equal(one.In[i].F32, values[i]) {
			return fmt.Errorf("its kernel writes input %s", c.def.In[i].Name)
		}
	}
	for k := range one.Out {
		name := c.def.Out[k].Name
		if !slices.Equal(Bytes(one.Out[k].F32), Bytes(other.Out[k].F32)) {
			return fmt.Errorf("output %s has other bits where Parallel runs in another order", name)
		}
		size := 0.0
		for _, v := range wide.Out[k].F64 {
			size = max(size, math.Abs(v))
		}
		for i, v := range one.Out[k].F32 {
			want := wide.Out[k].F64[i]
			if d := math.Abs(float64(v) - want); !(d <= 1e-5*(1+size)) {
				return fmt.Errorf("output %s, added to what is there %v: element %d is %g, %g by its reference", name, accum, i, v, want)
			}
		}
	}
	return nil
}

// derivative compares gradients with differences of a loss that weights every element of every
// output.
func (c *ownCheck) derivative(seed uint64) error {
	b := graph.NewBuilder()
	b.Unit("u")
	var ins []graph.Value
	for i, s := range c.in {
		ins = append(ins, b.Param(c.def.In[i].Name, graph.Normal(1), s...))
	}
	for k, y := range b.Apply(c.op, "own", c.attr, ins...) {
		if c.def.Out[k].Stat {
			continue
		}
		w := b.Param("weigh."+c.def.Out[k].Name, graph.Normal(1), b.Shape(y)...)
		b.SumLoss("loss."+c.def.Out[k].Name, b.Mul("weighed."+c.def.Out[k].Name, y, w))
	}
	p, err := b.Program()
	if err != nil {
		return err
	}
	q, err := graph.Differentiate(p)
	if err != nil {
		return err
	}
	params := make([][]float64, len(q.Params))
	for i := range params {
		params[i] = make([]float64, q.Params[i].Elems())
		for k := range params[i] {
			params[i][k] = c.rng.NormFloat64()
		}
	}
	base, wide, err := lossOf[float64](q, params)
	if err != nil {
		return err
	}
	_, single, err := lossOf[float32](q, params)
	if err != nil {
		return err
	}
	for i := range c.in {
		g, err := wide.Floats(0, q.Params[i].Grad)
		if err != nil {
			return err
		}
		g32, err := single.Floats(0, q.Params[i].Grad)
		if err != nil {
			return err
		}
		was, along, norm, off := params[i], 0.0, 0.0, 0.0
		dir := make([]float64, len(g))
		for k := range g {
			dir[k] = c.rng.NormFloat64()
			along += g[k] * dir[k]
			norm += g[k] * g[k]
			off = max(off, math.Abs(g[k]-float64(g32[k])))
		}
		norm = math.Sqrt(norm)
		const h = 1e-6
		var side [2]float64
		for s, step := range []float64{h, -h} {
			params[i] = slices.Clone(was)
			for k := range was {
				params[i][k] += step * dir[k]
			}
			if side[s], _, err = lossOf[float64](p, params); err != nil {
				return err
			}
		}
		params[i] = was
		numeric := (side[0] - side[1]) / (2 * h)
		if d := math.Abs(numeric - along); !(d <= 1e-5*(1+norm*math.Sqrt(float64(len(g))))+1e-7*math.Abs(base)) {
			return fmt.Errorf("gradient of %s: %g along a direction, %g by differences", c.def.In[i].Name, along, numeric)
		}
		if !(off <= 1e-4*(1+norm)) {
			return fmt.Errorf("gradient of %s: the kernel's is off the reference's by %g", c.def.In[i].Name, off)
		}
	}
	return nil
}

// lossOf runs a program whose only inputs are parameters.
func lossOf[T num.Float](p *graph.Program, params [][]float64) (float64, *interp.World[T], error) {
	w := interp.New[T](p)
	for i := range p.Params {
		if err := w.Set(p.Params[i].Value, as[T](params[i])); err != nil {
			return 0, nil, err
		}
	}
	loss, err := w.F64(0, p.Loss)
	if err != nil {
		return 0, nil, err
	}
	loss[0] = 0
	if p.Hyper != graph.NoBuf {
		hyper, err := w.F64(0, p.Hyper)
		if err != nil {
			return 0, nil, err
		}
		hyper[graph.HyperInvCount], hyper[graph.HyperLossScale] = 1, 1
	}
	if err := w.Run(p.Sections[0].Name); err != nil {
		return 0, nil, err
	}
	return loss[0], w, nil
}

func as[T, S num.Float](v []S) []T {
	out := make([]T, len(v))
	for i := range v {
		out[i] = T(v[i])
	}
	return out
}

func elems(shape []int64) int64 {
	n := int64(1)
	for _, d := range shape {
		n *= d
	}
	return n
}
