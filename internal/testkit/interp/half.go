package interp

import (
	"fmt"
	"math"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
)

func (c *call[T]) u16(id graph.BufID) []uint16 {
	v, err := c.w.U16(c.rank, id)
	c.note(err)
	return v
}

// narrowTo and widenFrom convert one element to and from a 16-bit type.
func narrowTo(dt graph.DType, v float32) uint16 {
	if dt == graph.BF16 {
		return num.BF16(v)
	}
	return num.F16(v)
}

func widenFrom(dt graph.DType, v uint16) float32 {
	if dt == graph.BF16 {
		return num.FromBF16(v)
	}
	return num.FromF16(v)
}

func isHalf(dt graph.DType) bool { return dt == graph.BF16 || dt == graph.F16 }

// floats returns a float buffer: the elements themselves, or a widened copy.
func (c *call[T]) floats(id graph.BufID) ([]T, error) {
	dt := c.w.prog.Buf(id).DType
	if !isHalf(dt) {
		return c.w.Floats(c.rank, id)
	}
	bits, err := c.w.U16(c.rank, id)
	v := make([]T, len(bits))
	for i, b := range bits {
		v[i] = T(widenFrom(dt, b))
	}
	return v, err
}

// round rounds values to the type of output i, without storing them.
func (c *call[T]) round(i int, v []T) { c.roundAs(c.w.prog.Buf(c.output(i)).DType, v) }

func (c *call[T]) roundAs(dt graph.DType, v []T) {
	if !isHalf(dt) || c.err != nil {
		return
	}
	for i, x := range v {
		v[i] = T(widenFrom(dt, narrowTo(dt, float32(x))))
	}
}

// narrow rounds the 16-bit outputs into their buffers.
func (c *call[T]) narrow() {
	for i, t := range c.half {
		if c.err != nil {
			return
		}
		bits, dt := c.u16(c.output(i)), c.w.prog.Buf(c.output(i)).DType
		for k := range bits {
			bits[k] = narrowTo(dt, float32(t.v[k]))
		}
	}
}

// collectiveHalf runs one group's collective on 16-bit elements, which are added
// in f32 and rounded once.
func (w *World[T]) collectiveHalf(kind graph.Kind, group []int, in graph.BufID, out graph.Out) error {
	dt := w.prog.Buf(out.Buf).DType
	wide := map[int][]float32{} // outputs by rank
	get := func(rank int, id graph.BufID) ([]float32, error) {
		bits, err := w.U16(rank, id)
		v := make([]float32, len(bits))
		for i, b := range bits {
			v[i] = widenFrom(dt, b)
		}
		if id == out.Buf {
			wide[rank] = v // of an all-reduce the second: it was copied from the first
		}
		return v, err
	}
	if err := collective(kind, group, in, out, get); err != nil {
		return err
	}
	for rank, v := range wide {
		bits, err := w.U16(rank, out.Buf)
		if err != nil {
			return err
		}
		for i := range bits {
			bits[i] = narrowTo(dt, v[i])
		}
	}
	return nil
}

func castKind[T num.Float](c *call[T]) {
	src, dst := c.w.prog.Buf(c.input(0)).DType, c.w.prog.Buf(c.output(0)).DType
	switch {
	case src == graph.F32 && !c.accum(0):
		x, y := c.in(0), c.u16(c.output(0))
		for i := range y {
			y[i] = narrowTo(dst, float32(x.v[i]))
		}
	case dst == graph.F32:
		x, y := c.u16(c.input(0)), c.out(0)
		for i := range x {
			c.store(0, &y.v[i], T(widenFrom(src, x[i])))
		}
	default:
		c.note(fmt.Errorf("no interpretation of a cast from %v to %v", src, dst))
	}
}

// low writes the updated parameters to output i in 16 bits, if the operation has that output.
func (c *call[T]) low(a graph.ShardAttr, p []T, i int) {
	if c.output(i) == graph.NoBuf {
		return
	}
	low, dt := c.u16(c.output(i)), c.w.prog.Buf(c.output(i)).DType
	if c.err == nil {
		c.shard(a, func(i int, _ element) { low[i] = narrowTo(dt, float32(p[i])) })
	}
}

func overflowCheck[T num.Float](c *call[T]) {
	acc := c.inI64(0)
	flag, err := c.w.I32(c.rank, c.output(0))
	c.note(err)
	if c.err != nil {
		return
	}
	flag[0] = 0
	if s := root(acc); math.IsNaN(s) || math.IsInf(s, 0) {
		flag[0] = 1
	}
}

func lossScaleUpdate[T num.Float](c *call[T]) {
	a, flag, state := attr[graph.LossScaleAttr](c), c.inI32(0), c.outF64(0)
	if c.err != nil {
		return
	}
	scale, clean := state[0], math.Max(state[1], 0)+1
	switch inRow := 1 + math.Max(-state[1], 0); {
	case flag[0] != 0 && inRow < float64(a.Hysteresis):
		clean = -inRow
	case flag[0] != 0:
		scale, clean = math.Max(a.Floor, scale*a.Backoff), 0
	case clean >= float64(a.Interval):
		scale, clean = scale*a.Growth, 0
	}
	state[0], state[1] = scale, clean
}
