package exec_test

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/kernels"
)

// pairProgram computes x → y → z on the compute stream. Between the two is an operation on the comm
// stream, for which z waits. x and y live in the phase only.
func pairProgram() *builder {
	b := newBuilder()
	x := b.buf("x", graph.F32, 8, graph.Device, graph.LifePhase)
	y := b.buf("y", graph.F32, 8, graph.Device, graph.LifePhase)
	z := b.buf("z", graph.F32, 8, graph.Device, graph.LifeRun)
	other := b.buf("other", graph.F32, 8, graph.Device, graph.LifeRun)
	b.port(graph.PortStaging, "staging", graph.U8, 256)
	gathered := b.p.NewEvent()
	b.p.Sections = []graph.Section{{Name: "step", Phases: []graph.Phase{{Name: "p", Repeat: 1, Ops: []graph.Op{
		op(zero, "x", graph.Compute, nil, wr(x)),
		op(spy, "sum", graph.Compute, ins(x), wr(y)),
		with(op(spy, "gather", graph.Comm, nil, rw(other)), gathered),
		with(op(spy, "norm", graph.Compute, ins(y), wr(z)), 0, gathered),
	}}}}}
	return b
}

// joinSumAndNorm lets the sum and the norm run as one kernel.
func joinSumAndNorm(first, second kernels.Binding) error {
	if first.Op.Name == "sum" && second.Op.Name == "norm" {
		return nil
	}
	return errApart
}

// Two operations for which the library has one kernel run at the second's place, after the events
// that it waits for. The buffers that the first reads and writes are not poisoned before that.
func TestTwoOperationsAsOne(t *testing.T) {
	b := pairProgram()
	var mu sync.Mutex
	var order []string
	j := newRanks(t, b, jobOptions{lib: library{joins: joinSumAndNorm, spy: func(k kernels.Binding) error {
		mu.Lock()
		defer mu.Unlock()
		order = append(order, k.Op.Name)
		if k.Op.Name == "gather" {
			return nil
		}
		in, err := cpu.Slice[float32](k.In[0])
		if err != nil {
			return err
		}
		out, err := cpu.Slice[float32](k.Out[0])
		for i := range out {
			out[i] = in[i] + 1
		}
		if in[7]-in[7] != 0 {
			err = fmt.Errorf("%s reads %v", k.Op.Name, in[7])
		}
		return err
	}}})
	require.NoError(t, j.ex[0].RunSection("step", nil))
	require.Equal(t, []string{"gather", "sum", "norm"}, order)
	z := make([]byte, 32)
	require.NoError(t, j.ex[0].Read(b.p.Find("z"), 0, z))
	require.Equal(t, byte(0x40), z[3], "2.0")

	j = newRanks(t, b, jobOptions{lib: library{joins: joinSumAndNorm, spy: func(k kernels.Binding) error {
		if k.Op.Name == "sum" {
			return errors.New("out of order")
		}
		return nil
	}}})
	require.ErrorContains(t, j.ex[0].RunSection("step", nil), "norm", "the second stands for both")
}

// FindNonFinite runs joined operations one at a time, and names the first of the two if its output
// is not finite.
func TestFindNonFiniteLooksAtEachOfTwo(t *testing.T) {
	b := pairProgram()
	j := newRanks(t, b, jobOptions{lib: library{joins: joinSumAndNorm, spy: func(k kernels.Binding) error {
		out, err := cpu.Slice[float32](k.Out[0])
		for i := range out {
			out[i] = 0
			if k.Op.Name != "gather" {
				out[i] = float32(math.Inf(1))
			}
		}
		return err
	}}})
	found, err := j.ex[0].FindNonFinite("step", nil)
	require.NoError(t, err)
	require.NotNil(t, found)
	require.Equal(t, "sum", found.Op.Name)
	require.Equal(t, "y", found.Buffer)
}

// If the library fails to join two operations, New's error names both.
func TestJoinFails(t *testing.T) {
	b := pairProgram()
	lib := library{joins: func(first, second kernels.Binding) error {
		if second.Op.Name == "norm" {
			return errors.New("no memory for a module")
		}
		return errApart
	}}
	_, err := exec.New(exec.Config{Program: b.p, Layout: b.layout, Context: cpu.New(0, cpu.Options{}), Library: lib})
	require.ErrorContains(t, err, "no memory for a module")
	require.ErrorContains(t, err, "sum")
	require.ErrorContains(t, err, "norm")
}
