package exec_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/inproc"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/alloctest"
	"github.com/spillway-ml/spillway/internal/testkit/fault"
	"github.com/spillway-ml/spillway/internal/testkit/nullcomm"
	"github.com/spillway-ml/spillway/internal/testkit/nulldevice"
	"github.com/spillway-ml/spillway/internal/testkit/nullkernels"
	"github.com/spillway-ml/spillway/kernels"
)

func encode(v []float32) []byte {
	var b []byte
	for _, x := range v {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(x))
	}
	return b
}

func factor(step, rank, micro int) float64 {
	return 0.01*float64(step+1) + 0.003*float64(rank) - 0.002*float64(micro)
}

// step runs one step on a rank; before each micro-step the host writes that micro-step's factor.
func (z *zero3) step(e *exec.Executor, step, rank int) (loss float64, err error) {
	e.SetStep(int64(step), 0)
	err = e.RunSection("step", func(ph *graph.Phase, repeat int) error {
		h, err := e.HostF64(z.p.Port(graph.PortHyper))
		if err != nil {
			return err
		}
		if ph.Name == "micro" {
			h[0] = factor(step, rank, repeat)
		} else {
			h[0] = math.NaN()
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	l, err := e.HostF64(z.p.Port(graph.PortLoss))
	if err != nil {
		return 0, err
	}
	return l[0], nil
}

func (z *zero3) init(rng *rand.Rand) []float32 {
	params := make([]float32, z.n)
	for i := range params {
		params[i] = float32(rng.NormFloat64())
	}
	return params
}

func (z *zero3) load(j *ranks, params []float32) {
	n := int(z.n) / len(j.ex)
	j.all(func(r int, e *exec.Executor) error { return e.Write(z.shard, 0, encode(params[r*n:(r+1)*n])) })
}

func TestShardedStepsEqualThePlainOnes(t *testing.T) {
	for _, w := range []int{1, 2, 3, 4, 5} {
		for _, slow := range []time.Duration{0, time.Millisecond} {
			t.Run(fmt.Sprintf("%d ranks/kernels take %v", w, slow), func(t *testing.T) {
				z := newZero3(w, 37)
				j := newRanks(t, z.builder, jobOptions{lib: library{slow: slow}})
				params := z.init(rand.New(rand.NewPCG(uint64(w), 5)))
				z.load(j, params)
				losses := make([]float64, w)
				for step := range 4 {
					j.all(func(r int, e *exec.Executor) (err error) {
						losses[r], err = z.step(e, step, r)
						return err
					})
					factors := make([][2]float64, w)
					for r := range factors {
						factors[r] = [2]float64{factor(step, r, 0), factor(step, r, 1)}
					}
					require.Equal(t, z.want(w, params, factors), losses, "step %d", step)
				}
				n := int(z.n) / w
				j.all(func(r int, e *exec.Executor) error {
					got := make([]byte, n*4)
					if err := e.Read(z.shard, 0, got); err != nil {
						return err
					}
					if want := encode(params[r*n : (r+1)*n]); !bytes.Equal(got, want) {
						return fmt.Errorf("parameters differ")
					}
					return nil
				})
				for _, e := range j.ex {
					for s := range graph.NumSpaces {
						require.Equal(t, z.layout.Spaces[s].Peak, e.Touched(s), "the plan is the peak of %s memory", s)
					}
					full := z.n * 4
					require.Equal(t, 4*2*2*(full-full/int64(w)), e.CommStats().Sent, "4 steps of 2 gathers and 2 scatters")
				}
			})
		}
	}
}

func TestNullDeviceGoesThroughTheWholeProgram(t *testing.T) {
	const w = 3
	z := newZero3(w, 1<<30) // 12 GiB a buffer, never allocated
	for r := range w {
		c := nulldevice.New(r)
		e, err := exec.New(exec.Config{Program: z.p, Layout: z.layout, Context: c, Library: nullkernels.Library{},
			Groups: map[int]comm.Group{-1: nullcomm.New(r, w)}, Coord: []int{r}})
		require.NoError(t, err)
		_, err = z.step(e, 0, r)
		require.NoError(t, err)
		require.Equal(t, z.layout.Spaces[graph.Device].Peak, e.Touched(graph.Device))
		require.Equal(t, int64(2+2*3+1), c.Launches(graph.Compute))
		require.Equal(t, int64(2*2+1), c.Launches(graph.Comm))
		require.NoError(t, e.Close())
	}
}

// Every launch of one rank fails in turn. Every rank must return an error that names the failed
// rank and its operation, and no rank may stay blocked.
func TestFaultAtEveryLaunchEndsTheJobOnEveryRank(t *testing.T) {
	const w, bad = 3, 1
	for _, mode := range []struct {
		mode fault.Mode
		what string
	}{{fault.AtLaunch, "injected fault"}, {fault.WhenRun, "injected fault"}, {fault.Panic, "broken invariant: the kernel panicked at fault.go:"}} {
		// Three steps run and the launches of the first two fail in turn: a rank
		// that is done with its section when a peer fails learns of it in the next.
		last := false
		for n := int64(1); !last; n++ {
			z := newZero3(w, 40)
			var f *fault.Context
			j := newRanks(t, z.builder, jobOptions{wrap: func(r int, c device.Context) device.Context {
				if r != bad {
					return c
				}
				f = fault.Wrap(c, fault.Plan{Launch: n, Label: "", Mode: mode.mode})
				return f
			}})
			begin := time.Now()
			errs := j.each(func(r int, e *exec.Executor) error {
				for step := range 3 {
					if _, err := z.step(e, step, r); err != nil {
						return err
					}
				}
				return nil
			})
			require.Less(t, time.Since(begin), 20*time.Second)
			require.True(t, f.Fired())
			last = errStep(errs[bad]) == 2
			for r, err := range errs {
				require.Error(t, err, "mode %d, launch %d, rank %d", mode.mode, n, r)
				require.ErrorContains(t, err, mode.what)
				require.ErrorContains(t, err, "rank 1, step ")
				require.Regexp(t, `section step, phase (begin|micro|update), operation \S+ on stream|operation release .* on stream`, err.Error())
				if r != bad {
					require.ErrorContains(t, err, fmt.Sprintf("rank %d, step ", r))
					require.ErrorIs(t, err, comm.ErrAborted)
				}
				if mode.mode != fault.Panic {
					require.ErrorIs(t, err, fault.ErrInjected)
				}
				require.Equal(t, err.Error(), func() string { _, e := z.step(j.ex[r], errStep(err), r); return e.Error() }(), "the error stays")
			}
		}
	}
}

// errStep returns the step that an error names.
func errStep(err error) (step int) {
	var rank int
	_, _ = fmt.Sscanf(err.Error(), "rank %d, step %d", &rank, &step)
	return step
}

func TestStuckRankIsNamedOnEveryRank(t *testing.T) {
	const w, bad = 4, 2
	z := newZero3(w, 40)
	j := newRanks(t, z.builder, jobOptions{timeout: 500 * time.Millisecond, unchecked: true, wrap: func(r int, c device.Context) device.Context {
		if r != bad {
			return c
		}
		return fault.Wrap(c, fault.Plan{Launch: 3, Label: "loss", Mode: fault.Hang})
	}})
	begin := time.Now()
	errs := j.each(func(r int, e *exec.Executor) error {
		for step := range 3 {
			if _, err := z.step(e, step, r); err != nil {
				return err
			}
		}
		return nil
	})
	require.Less(t, time.Since(begin), 10*time.Second)
	for r, err := range errs {
		require.ErrorIs(t, err, comm.ErrTimeout, "rank %d", r)
		// A rank learns of the timeout from its own collective or from the group, whichever comes
		// first.
		require.Regexp(t, fmt.Sprintf("^rank %d, step 0, section step(, phase micro, operation g/scatter on stream comm)?: timeout: ", r), err.Error())
		require.ErrorContains(t, err, `reduce_scatter "micro/g/scatter" (call 4 of the world group): rank 2 did not arrive within 500ms; ranks 0, 1, 3 waited`)
	}
}

func TestErrorOfBeforeAndAbort(t *testing.T) {
	z := newZero3(2, 40)
	j := newRanks(t, z.builder, jobOptions{})
	disk := errors.New("cannot read tokens")
	errs := j.each(func(r int, e *exec.Executor) error {
		return e.RunSection("step", func(ph *graph.Phase, _ int) error {
			if r == 1 && ph.Name == "micro" {
				return disk
			}
			return nil
		})
	})
	require.EqualError(t, errs[1], "rank 1, section step: phase micro: cannot read tokens")
	require.ErrorIs(t, errs[0], disk)
	require.Regexp(t, "^rank 0, section step.*: aborted: rank 1, section step: phase micro: cannot read tokens$", errs[0].Error())

	j = newRanks(t, z.builder, jobOptions{})
	stop := errors.New("interrupted")
	go j.ex[0].Abort(stop)
	for _, err := range j.each(func(r int, e *exec.Executor) error {
		for {
			if _, err := z.step(e, 0, r); err != nil {
				return err
			}
		}
	}) {
		require.ErrorIs(t, err, stop)
	}
}

func TestTransfersThroughStaging(t *testing.T) {
	z := newZero3(1, 100) // 400 bytes through a staging buffer of 48
	j := newRanks(t, z.builder, jobOptions{})
	e := j.ex[0]
	data := make([]byte, 400)
	rng := rand.NewChaCha8([32]byte{7})
	_, _ = rng.Read(data)
	require.NoError(t, e.Write(z.shard, 0, data))
	got := make([]byte, 400)
	require.NoError(t, e.Read(z.shard, 0, got))
	require.Equal(t, data, got)
	require.NoError(t, e.Write(z.shard, 101, data[:150]))
	require.NoError(t, e.Read(z.shard, 90, got[:200]))
	require.Equal(t, data[90:101], got[:11])
	require.Equal(t, data[:150], got[11:161])
	require.Equal(t, data[251:290], got[161:200])
	require.NoError(t, e.Write(z.p.Port(graph.PortHyper), 8, data[:8]))
	h, err := e.HostF64(z.p.Port(graph.PortHyper))
	require.NoError(t, err)
	require.Equal(t, binary.LittleEndian.Uint64(data), math.Float64bits(h[1]))
	require.NoError(t, e.Read(z.p.Port(graph.PortHyper), 8, got[:8]))
	require.Equal(t, data[:8], got[:8])

	require.EqualError(t, e.Write(z.shard, 390, data[:11]), "exec: rank 0: write 11 bytes at byte 390 of p: it has 400 bytes")
	require.ErrorContains(t, e.Read(z.shard, -1, got[:1]), "it has 400 bytes")
	require.ErrorContains(t, e.Read(graph.NoBuf, 0, got[:1]), "buffer -1")
	require.ErrorContains(t, e.Read(99, 0, got[:1]), "buffer 99 of")
	_, err = e.HostI64(z.p.Port(graph.PortHyper))
	require.ErrorContains(t, err, `"host hyper" has dtype f64, want i64`)
	_, err = e.HostF32(z.shard)
	require.ErrorContains(t, err, "in device memory, want host memory")
	_, err = e.HostI32(graph.NoBuf)
	require.ErrorContains(t, err, "the program lacks it")
	z.p.Buf(z.p.Port(graph.PortStaging)).Port = graph.NoPort
	require.ErrorContains(t, e.Read(z.shard, 0, got), "the program has no staging buffer")
}

// A view with a rank stride addresses a different part of its base on each rank.
func TestRankViews(t *testing.T) {
	const w = 3
	b := newBuilder(graph.Axis{Name: "data", Size: w})
	full := b.buf("full", graph.F32, 4*w, graph.Device, graph.LifeRun)
	part := b.view("part", graph.F32, 4, graph.View{Base: full, RankStride: 16})
	tail := b.view("tail", graph.F32, 2, graph.View{Base: part, Offset: 8})
	b.port(graph.PortStaging, "staging", graph.U8, 64)
	b.p.Sections = []graph.Section{{Name: "gather", Phases: []graph.Phase{{Name: "p", Repeat: 1, Ops: []graph.Op{
		grouped(op(graph.AllGather, "ag", graph.Comm, ins(part), wr(full))),
		grouped(op(graph.AllReduce, "ar", graph.Comm, nil, rw(tail))),
	}}}}}
	j := newRanks(t, b, jobOptions{})
	j.all(func(r int, e *exec.Executor) error {
		v := float32(r + 1)
		return e.Write(part, 0, encode([]float32{v, v, v, v}))
	})
	j.all(func(r int, e *exec.Executor) error { return e.RunSection("gather", nil) })
	for r, e := range j.ex {
		got := make([]byte, 48)
		require.NoError(t, e.Read(full, 0, got))
		want := []float32{1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3}
		want[r*4+2], want[r*4+3] = 6, 6 // each rank's own tail was summed
		require.Equal(t, encode(want), got)
	}
}

// RunSection calls before only when the operations enqueued so far have read the host's inputs, so
// before may overwrite them, even if an operation is slow to read.
func TestHostInputsAreNotOverwrittenTooSoon(t *testing.T) {
	b := newBuilder()
	p := b.p
	b.port(graph.PortHyper, "host hyper", graph.F64, graph.NumHyper)
	b.port(graph.PortLoss, "host loss", graph.F64, 1)
	var seen []float64
	b.p.Sections = []graph.Section{{Name: "step", Phases: []graph.Phase{{Name: "micro", Repeat: 5, Ops: []graph.Op{
		op(spy, "host update", graph.HostWork, ins(p.Port(graph.PortHyper)), wr(p.Port(graph.PortLoss))),
	}}}}}
	j := newRanks(t, b, jobOptions{lib: library{spy: func(b kernels.Binding) error {
		time.Sleep(2 * time.Millisecond)
		h, err := cpu.Slice[float64](b.In[0])
		seen = append(seen, h[3])
		return err
	}}})
	require.NoError(t, j.ex[0].RunSection("step", func(_ *graph.Phase, repeat int) error {
		h, err := j.ex[0].HostF64(p.Port(graph.PortHyper))
		if err == nil {
			h[3] = float64(repeat)
		}
		return err
	}))
	require.Equal(t, []float64{0, 1, 2, 3, 4}, seen)
}

func TestReleasedBytesArePoison(t *testing.T) {
	b := newBuilder()
	x := b.buf("x", graph.F32, 8, graph.Device, graph.LifePhase)
	y := b.buf("y", graph.F32, 8, graph.Device, graph.LifeStep)
	kept := b.buf("kept", graph.F32, 8, graph.Device, graph.LifeRun)
	e1, e2 := b.p.NewEvent(), b.p.NewEvent()
	b.p.Sections = []graph.Section{{Name: "step", Phases: []graph.Phase{
		{Name: "a", Repeat: 2, Ops: []graph.Op{
			with(op(zero, "x", graph.Compute, nil, wr(x)), 0, e2),
			op(zero, "y", graph.Compute, nil, wr(y)),
			with(op(zero, "kept", graph.Compute, nil, wr(kept)), e1),
			with(op(sub, "x/last", graph.Comm, ins(x), rw(kept)), 0, e1),
			with(op(spy, "x/dead", graph.Comm, nil, rw(kept)), e2),
		}},
		{Name: "b", Repeat: 1, Ops: []graph.Op{
			with(op(sub, "y/last", graph.Compute, ins(y), rw(kept)), 0, e2),
			op(spy, "y/dead", graph.Compute, nil, rw(kept)),
		}},
	}}}
	var j *ranks
	var got []string
	j = newRanks(t, b, jobOptions{lib: library{spy: func(k kernels.Binding) error {
		for _, id := range []graph.BufID{x, y, kept} { // values that a stray read would return
			v, err := cpu.Slice[float32](device.Ptr{Arena: k.Out[0].Arena, Off: b.layout.Offset[id], Len: 32})
			if err != nil {
				return err
			}
			got = append(got, fmt.Sprintf("%s %s %v", k.Op.Name, b.p.Buf(id).Name, v[7]))
		}
		return nil
	}}})
	require.NoError(t, j.ex[0].RunSection("step", nil))
	require.Equal(t, []string{
		"x/dead x NaN", "x/dead y 0", "x/dead kept 0",
		"x/dead x NaN", "x/dead y 0", "x/dead kept 0",
		"y/dead x NaN", "y/dead y NaN", "y/dead kept 0"}, got)
}

// A Wait refers to the latest Record of its event, even one in an earlier phase.
func TestEventsCarryAcrossPhases(t *testing.T) {
	b := newBuilder()
	x := b.buf("x", graph.F32, 1, graph.Device, graph.LifeRun)
	done := b.p.NewEvent()
	var order []string
	phase := func(name string, ops ...graph.Op) graph.Phase { return graph.Phase{Name: name, Repeat: 1, Ops: ops} }
	b.p.Sections = []graph.Section{{Name: "step", Phases: []graph.Phase{
		phase("first", with(op(spy, "slow", graph.Compute, nil, rw(x)), done)),
		phase("second", with(op(spy, "after", graph.Comm, nil, rw(x)), 0, done)),
	}}}
	j := newRanks(t, b, jobOptions{lib: library{spy: func(k kernels.Binding) error {
		if k.Op.Name == "slow" {
			time.Sleep(3 * time.Millisecond)
		}
		order = append(order, k.Op.Name)
		return nil
	}}})
	for range 3 {
		require.NoError(t, j.ex[0].RunSection("step", nil))
	}
	require.Equal(t, []string{"slow", "after", "slow", "after", "slow", "after"}, order)
	require.NoError(t, j.ex[0].RunPhase("step", "first"))
	require.NoError(t, j.ex[0].Sync())
	require.ErrorContains(t, j.ex[0].RunPhase("step", "third"), `section step has no phase "third"`)
	require.ErrorContains(t, j.ex[0].RunSection("eval", nil), `the program has no section "eval"`)
	require.NoError(t, j.ex[0].Close())
	require.ErrorContains(t, j.ex[0].RunSection("step", nil), "the executor is closed")
	require.ErrorContains(t, j.ex[0].Read(x, 0, make([]byte, 4)), "the executor is closed")
}

// A join has no kernel. Operations behind it on its stream, or behind its event, start after the
// events that it waits for.
func TestJoinOrdersStreams(t *testing.T) {
	b := newBuilder()
	x := b.buf("x", graph.F32, 1, graph.Device, graph.LifeRun)
	a, c, both := b.p.NewEvent(), b.p.NewEvent(), b.p.NewEvent()
	var order []string
	var mu sync.Mutex
	b.p.Sections = []graph.Section{{Name: "step", Phases: []graph.Phase{{Name: "p", Repeat: 3, Ops: []graph.Op{
		with(op(spy, "a", graph.Compute, nil, rw(x)), a),
		with(op(spy, "b", graph.Comm, nil, rw(x)), c),
		with(op(graph.Join, "join", graph.CopyIn, nil), both, a, c),
		with(op(spy, "after", graph.HostWork, nil, rw(x)), 0, both),
	}}}}}
	j := newRanks(t, b, jobOptions{unchecked: true, trace: exec.NewTrace(20), lib: library{spy: func(k kernels.Binding) error {
		if k.Op.Name != "after" {
			time.Sleep(2 * time.Millisecond)
		}
		mu.Lock()
		defer mu.Unlock()
		order = append(order, k.Op.Name)
		return nil
	}}})
	require.NoError(t, j.ex[0].RunSection("step", nil))
	require.Len(t, order, 9)
	done := map[string]int{}
	for _, name := range order {
		done[name]++
		if name == "after" {
			require.GreaterOrEqual(t, min(done["a"], done["b"]), done["after"], "%v", order)
		}
	}
}

func TestTrace(t *testing.T) {
	const w = 2
	z := newZero3(w, 40)
	z.p.Sections[0].Phases[1].Ops[2].Unit = 0
	z.p.Sections[0].Phases[1].Ops[2].Pass = graph.Backward
	trace := exec.NewTrace(1000)
	j := newRanks(t, z.builder, jobOptions{trace: trace})
	z.load(j, z.init(rand.New(rand.NewPCG(1, 1))))
	j.all(func(r int, e *exec.Executor) error { _, err := z.step(e, 0, r); return err })
	var out bytes.Buffer
	require.NoError(t, trace.Write(&out))
	var doc struct {
		TraceEvents []struct {
			Name, Ph, Cat string
			Pid, Tid      int
			Ts, Dur       float64
			Args          map[string]any
		}
	}
	require.NoError(t, json.Unmarshal(out.Bytes(), &doc))
	type at struct{ rank, stream int }
	names, ends := map[at]string{}, map[at]float64{}
	gathered := map[int]float64{}
	count := 0
	for _, e := range doc.TraceEvents {
		k := at{e.Pid, e.Tid}
		switch e.Ph {
		case "M":
			if e.Name == "thread_name" {
				names[k] = e.Args["name"].(string)
			}
		case "X":
			require.GreaterOrEqual(t, e.Ts, ends[k], "a stream is in order")
			ends[k] = e.Ts + e.Dur
			if e.Name == "p/gather" && gathered[e.Pid] == 0 {
				gathered[e.Pid] = e.Ts + e.Dur
			}
			if e.Cat != "" {
				count++
			}
		}
	}
	require.Equal(t, "compute", names[at{0, 0}])
	require.Equal(t, "comm", names[at{1, 1}])
	require.Equal(t, w*(2+2*6+3), count)
	for _, e := range doc.TraceEvents {
		if e.Name == "g" {
			require.Equal(t, map[string]any{"kind": "test_scale_by", "section": "step", "phase": "micro", "pass": "backward", "unit": "h.0", "bytes": float64(z.n*8 + 128)}, e.Args)
			require.GreaterOrEqual(t, e.Ts+0.001, gathered[e.Pid], "the event orders the streams")
		}
	}

	small := exec.NewTrace(3)
	j = newRanks(t, z.builder, jobOptions{trace: small})
	j.all(func(r int, e *exec.Executor) error { _, err := z.step(e, 0, r); return err })
	out.Reset()
	require.NoError(t, small.Write(&out))
	require.True(t, json.Valid(out.Bytes()))
	require.Contains(t, out.String(), "the trace is full")
}

func TestPhasesAllocateNothing(t *testing.T) {
	z := newZero3(1, 1000)
	w, err := inproc.New(z.p.Mesh, inproc.Options{})
	require.NoError(t, err)
	groups, err := w.Groups(0)
	require.NoError(t, err)
	e, err := exec.New(exec.Config{Program: z.p, Layout: z.layout, Context: cpu.New(0, cpu.Options{}), Library: library{},
		Groups: groups, Coord: []int{0}, Trace: exec.NewTrace(100)})
	require.NoError(t, err)
	defer e.Close()
	fill := func(ph *graph.Phase, _ int) error { return nil }
	run := func() {
		_ = e.RunPhase("step", "micro")
		_ = e.RunSection("step", fill)
	}
	run()
	require.Zero(t, alloctest.PerRun(50, run))
	require.NoError(t, e.Sync())
}
