package direct

import (
	"fmt"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels/cpu/vec"
)

// leafAdder adds the ranks' gradient contributions (leaves) from left to right to an f32
// sum, reading them in place.
type leafAdder struct{ k vec.SumLeaves }

// of sets the element type of the addends.
func (a *leafAdder) of(dtype graph.DType) error {
	switch dtype {
	case graph.F32:
		a.k.As = vec.NoHalf
	case graph.BF16:
		a.k.As = vec.BF16
	case graph.F16:
		a.k.As = vec.F16
	default:
		return fmt.Errorf("no sum of %s in the order %s, want f32, bf16 or f16", dtype, graph.SumSequential)
	}
	return nil
}

// sum adds srcs to dst in order. Without accumulate the first source replaces dst. It
// allocates only when it gets more sources than ever before.
func (a *leafAdder) sum(dst []byte, srcs [][]byte, accumulate bool) {
	k := &a.k
	k.Dst, k.Accumulate = elements[float32](dst), accumulate
	k.Srcs, k.Halves = k.Srcs[:0], k.Halves[:0]
	for _, s := range srcs {
		if k.As == vec.NoHalf {
			k.Srcs = append(k.Srcs, elements[float32](s))
		} else {
			k.Halves = append(k.Halves, elements[uint16](s))
		}
	}
	if err := k.Run(nil); err != nil {
		panic(err) // CheckScatter compared the lengths
	}
}

// squaresOf converts s to the form that package vec uses, with memory of this process.
func squaresOf(s comm.Squares) (q vec.Squares, err error) {
	if s.Acc.Arena == nil {
		return q, nil
	}
	for _, span := range s.Spans {
		q.Spans = append(q.Spans, vec.Range{Lo: span[0], Hi: span[1]})
	}
	q.Acc, err = cpu.Slice[int64](s.Acc)
	return q, err
}

// newLeafAdder returns the function that adds a rank's part of all ranks' addends, reading
// them directly from the ranks' memory.
func newLeafAdder(c comm.Call, size int) (func(*Mover) (int64, int64), error) {
	a := &leafAdder{}
	if err := a.of(c.Sig.DType); err != nil {
		return nil, err
	}
	check := func(p device.Ptr, dtype graph.DType) (err error) {
		if dtype == graph.F32 {
			_, err = cpu.Slice[float32](p)
		} else {
			_, err = cpu.Slice[uint16](p)
		}
		return err
	}
	if err := check(c.In, c.Sig.DType); err != nil {
		return nil, err
	}
	if err := check(c.Out, graph.F32); err != nil {
		return nil, err
	}
	squares, err := squaresOf(c.Squares)
	if err != nil {
		return nil, err
	}
	a.k.Squares = &squares
	leaf := c.Sig.Bytes / int64(size)
	srcs := make([][]byte, size)
	return func(m *Mover) (read, written int64) {
		for j := range srcs {
			srcs[j] = m.Peers[j].In[int64(m.rank)*leaf:][:leaf]
		}
		sum := m.Peers[m.rank].Out
		if len(sum) > 0 {
			a.sum(sum, comm.Addends(&c, srcs), c.Sig.Accumulate)
		}
		read, written = leaf*int64(size), int64(len(sum))
		if c.Sig.Accumulate {
			read += written
		}
		return read, written
	}, nil
}
