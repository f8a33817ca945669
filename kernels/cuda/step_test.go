//go:build linux

package cuda_test

import (
	"fmt"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device"
	devcpu "github.com/spillway-ml/spillway/device/cpu"
	devcuda "github.com/spillway-ml/spillway/device/cuda"
	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/blastest"
	"github.com/spillway-ml/spillway/internal/testkit/drivertest"
	"github.com/spillway-ml/spillway/internal/testkit/interp"
	"github.com/spillway-ml/spillway/internal/testkit/optest"
	"github.com/spillway-ml/spillway/internal/testkit/shim"
	"github.com/spillway-ml/spillway/kernels"
	"github.com/spillway-ml/spillway/kernels/cpu"
	"github.com/spillway-ml/spillway/kernels/cpu/num"
	"github.com/spillway-ml/spillway/kernels/cpu/pool"
	"github.com/spillway-ml/spillway/kernels/cuda"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/precision"
	"github.com/spillway-ml/spillway/recompute"
	"github.com/spillway-ml/spillway/zero"
)

// These tests run complete training steps on the driver double, with every kernel compiled from its
// CUDA source, and compare them with the CPU.

const (
	stepBatch, stepSeq = 2, 9
	stepVocab          = 61
)

var stepModels = map[string]model.Config{
	"gpt2": {Family: model.GPT2, Layers: 2, Width: 24, Heads: 3, Vocab: stepVocab, Positions: stepSeq, TiedHead: true, EmbdDropout: 0.1, ResidDropout: 0.1},
	"llama": {Family: model.Llama, Layers: 2, Width: 32, Heads: 4, KVHeads: 2, FFN: 40, Vocab: stepVocab, Positions: stepSeq, QKVBias: true,
		RopeScaling: &model.RopeScaling{Factor: 8, LowFreq: 1, HighFreq: 4, OriginalPositions: 8}},
}

func stepPlan(t *testing.T, name string, target graph.Target, prec precision.Precision, optimizer zero.Optimizer, again string) *plan.Plan {
	f, err := model.Build(stepModels[name], model.Train, stepBatch, stepSeq)
	require.NoError(t, err)
	o, err := recompute.Parse(again)
	require.NoError(t, err)
	p, err := plan.Build(plan.Forward{Train: f}, plan.Config{Ranks: 1, Accum: 2, Prefetch: 1, Clip: 1, Optimizer: optimizer, Target: target,
		Precision: prec, Recompute: o, Verify: true})
	require.NoError(t, err)
	return p
}

var (
	adamW = zero.Optimizer{Name: "adamw", Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Decay: 0.1}
	// With a rate of 1 the parameters' change is the gradient.
	plainSGD = zero.Optimizer{Name: "sgd"}
)

// machine executes a plan.
type machine interface {
	run(section string, fill func(micro int)) error
	write(buf graph.BufID, elem int64, v []float32)
	read(buf graph.BufID, n int64) []float32
	hostI32(buf graph.BufID) []int32
	hostI64(buf graph.BufID) []int64
	hostF64(buf graph.BufID) []float64
}

// executed is a plan running on a device.
type executed struct {
	t *testing.T
	e *exec.Executor
}

func (x *executed) run(section string, fill func(int)) error {
	micro := 0
	return x.e.RunSection(section, func(ph *graph.Phase, _ int) error {
		if fill != nil && ph.Name != "update" {
			fill(micro)
			micro++
		}
		return nil
	})
}

func (x *executed) write(buf graph.BufID, elem int64, v []float32) {
	require.NoError(x.t, x.e.Write(buf, 4*elem, optest.Bytes(v)))
}

func (x *executed) read(buf graph.BufID, n int64) []float32 {
	v := make([]float32, n)
	require.NoError(x.t, x.e.Read(buf, 0, optest.Bytes(v)))
	return v
}

func some[T any](t *testing.T, v []T, err error) []T {
	require.NoError(t, err)
	return v
}

func (x *executed) hostI32(b graph.BufID) []int32 {
	v, err := x.e.HostI32(b)
	return some(x.t, v, err)
}

func (x *executed) hostI64(b graph.BufID) []int64 {
	v, err := x.e.HostI64(b)
	return some(x.t, v, err)
}

func (x *executed) hostF64(b graph.BufID) []float64 {
	v, err := x.e.HostF64(b)
	return some(x.t, v, err)
}

// interpreted is a plan in the CPU's interpreter, whose 16-bit arithmetic is the reference.
type interpreted struct {
	t *testing.T
	w *interp.World[float32]
}

func (x *interpreted) run(section string, fill func(int)) error {
	if fill != nil {
		fill(0) // all micro-batches are equal
	}
	return x.w.Run(section)
}

func (x *interpreted) write(buf graph.BufID, elem int64, v []float32) {
	all, err := x.w.Floats(0, buf)
	require.NoError(x.t, err)
	copy(all[elem:], v)
}

func (x *interpreted) read(buf graph.BufID, n int64) []float32 {
	all, err := x.w.Floats(0, buf)
	return append([]float32(nil), some(x.t, all, err)[:n]...)
}

func (x *interpreted) hostI32(b graph.BufID) []int32 {
	v, err := x.w.I32(0, b)
	return some(x.t, v, err)
}

func (x *interpreted) hostI64(b graph.BufID) []int64 {
	v, err := x.w.I64(0, b)
	return some(x.t, v, err)
}

func (x *interpreted) hostF64(b graph.BufID) []float64 {
	v, err := x.w.F64(0, b)
	return some(x.t, v, err)
}

// start prepares a plan on a device.
func start(t *testing.T, p *plan.Plan, ctx device.Context, lib kernels.Library) *executed {
	e, err := exec.New(exec.Config{Program: p.Program, Layout: p.Layout, Context: ctx, Library: lib, Coord: make([]int, len(p.Program.Mesh)), Poison: true})
	require.NoError(t, err)
	return &executed{t, e}
}

// onCPU runs f with a plan on the CPU's device.
func onCPU(t *testing.T, p *plan.Plan, f func(machine)) {
	pl := pool.New(1)
	defer pl.Close()
	x := start(t, p, devcpu.New(0, devcpu.Options{Poison: true}), cpu.New(pl))
	f(x)
	require.NoError(t, x.e.Close())
}

// onDouble runs f with a plan on the double of a GPU. Nothing outside the plan's memory may be
// touched, and the highest bytes touched must be the planned peaks.
func onDouble(t *testing.T, p *plan.Plan, seed uint64, f func(machine)) {
	compiler, err := shim.New()
	if err == shim.ErrNoCompiler {
		t.Skip(err)
	}
	require.NoError(t, err)
	d := drivertest.Start(t, drivertest.Options{Seed: seed})
	pl := pool.New(1)
	defer pl.Close()
	devices, err := d.Devices()
	require.NoError(t, err)
	ctx, err := devcuda.New(0, devcuda.Options{Driver: d, Poison: true})
	require.NoError(t, err)
	lib, err := cuda.New(cuda.Options{API: d, Device: devices[0], Compiler: compiler, Products: blastest.New(d), Host: cpu.New(pl)})
	require.NoError(t, err)
	x := start(t, p, ctx, lib)
	f(x)
	require.Equal(t, p.Layout.Spaces[graph.Device].Peak, x.e.Touched(graph.Device), "the plan is the peak")
	require.Equal(t, p.Layout.Spaces[graph.Host].Peak, x.e.Touched(graph.Host), "the plan is the peak")
	require.NoError(t, x.e.Close())
	require.NoError(t, lib.Close())
	require.Empty(t, d.Faults())
}

// train initialises the parameters, runs steps, and returns their mean losses and the final
// parameters.
func train(t *testing.T, p *graph.Program, m machine, steps int, lr float64) (losses []float64, params [][]float32) {
	if p.Section("init") != nil {
		require.NoError(t, m.run("init", nil))
	}
	for i := range p.Params {
		prm := &p.Params[i]
		v := make([]float32, prm.Elems())
		switch prm.Init {
		case graph.InitNormal:
			num.FillNormal(v, prm.Std*5, 1, num.Stream(prm.Name), 0)
		case graph.InitOnes:
			for k := range v {
				v[k] = 1
			}
		}
		for _, s := range p.Units[prm.Unit].Segments {
			if s.Param == i {
				m.write(p.Units[prm.Unit].Value.Buf, s.Flat, v[s.Start:s.Start+s.Len])
			}
		}
	}
	if p.Section("refresh") != nil {
		require.NoError(t, m.run("refresh", nil))
	}
	const counted = 2 * (stepBatch*stepSeq - 1) // targets in two micro-batches
	for step := range steps {
		require.NoError(t, m.run("step", func(micro int) {
			tokens, targets := m.hostI32(p.Port(graph.PortTokens)), m.hostI32(p.Port(graph.PortTargets))
			for i := range tokens {
				tokens[i], targets[i] = int32(i*7%stepVocab), int32((i*7+7)%stepVocab)
			}
			targets[3] = -1
			h := m.hostF64(p.Port(graph.PortHyper))
			clear(h)
			h[graph.HyperLR], h[graph.HyperInvCount], h[graph.HyperLossScale] = lr, 1.0/counted, 1
			h[graph.HyperBC1], h[graph.HyperBC2] = 1-math.Pow(0.9, float64(step+1)), 1-math.Pow(0.95, float64(step+1))
			if p.Port(graph.PortKey) != graph.NoBuf {
				key := m.hostI64(p.Port(graph.PortKey))
				clear(key)
				key[graph.KeySeed], key[graph.KeyStep] = 1, int64(step)
			}
		}))
		losses = append(losses, m.hostF64(p.Port(graph.PortLoss))[0]/counted)
	}
	for i := range p.Units {
		var n int64
		for _, s := range p.Units[i].Segments {
			n = max(n, s.Flat+s.Len)
		}
		params = append(params, m.read(p.Units[i].Value.Buf, n))
	}
	return losses, params
}

// gap returns ‖a − b‖ / ‖b‖.
func gap(t *testing.T, a, b []float32) float64 {
	require.Len(t, a, len(b))
	var d, n float64
	for i := range a {
		d += (float64(a[i]) - float64(b[i])) * (float64(a[i]) - float64(b[i]))
		n += float64(b[i]) * float64(b[i])
	}
	return math.Sqrt(d / n)
}

func TestTrainingStepsFollowTheCPU(t *testing.T) {
	for name := range stepModels {
		for seed, again := range []string{"none", "full"} {
			t.Run(name+"/recompute "+again, func(t *testing.T) {
				var want, got []float64
				onCPU(t, stepPlan(t, name, graph.CPUTarget(), precision.FP32, adamW, again), func(m machine) {
					want, _ = train(t, stepPlan(t, name, graph.CPUTarget(), precision.FP32, adamW, again).Program, m, 5, 1e-2)
				})
				p := stepPlan(t, name, graph.CUDATarget(), precision.FP32, adamW, again)
				onDouble(t, p, uint64(seed), func(m machine) { got, _ = train(t, p.Program, m, 5, 1e-2) })
				require.Less(t, want[4], want[0]-1, "it learns")
				for i := range want {
					require.InEpsilon(t, want[i], got[i], 1e-5, "step %d: %v, want %v", i+1, got, want)
				}
			})
		}
	}
}

// Without moments and with a rate of 1, parameters change by the gradient, which must be close to
// the CPU's.
func TestGradientsFollowTheCPU(t *testing.T) {
	for name := range stepModels {
		t.Run(name, func(t *testing.T) {
			var before, want, got [][]float32
			cpuPlan := stepPlan(t, name, graph.CPUTarget(), precision.FP32, plainSGD, "none")
			onCPU(t, cpuPlan, func(m machine) {
				_, before = train(t, cpuPlan.Program, m, 0, 1)
				_, want = train(t, cpuPlan.Program, m, 1, 1)
			})
			p := stepPlan(t, name, graph.CUDATarget(), precision.FP32, plainSGD, "none")
			onDouble(t, p, 0, func(m machine) { _, got = train(t, p.Program, m, 1, 1) })
			for u := range want {
				change := func(after []float32) []float32 {
					d := make([]float32, len(after))
					for i := range d {
						d[i] = after[i] - before[u][i]
					}
					return d
				}
				require.Less(t, gap(t, change(got[u]), change(want[u])), 1e-5, "unit %s", p.Program.Units[u].Name)
			}
		})
	}
}

// A bf16 program stays close to the interpreter on the same program.
func TestMixedPrecisionStepsFollowTheCPU(t *testing.T) {
	for name := range stepModels {
		t.Run(name, func(t *testing.T) {
			p := stepPlan(t, name, graph.CUDATarget(), precision.BF16, adamW, "none")
			want, _ := train(t, p.Program, &interpreted{t, interp.New[float32](p.Program)}, 5, 1e-2)
			var got []float64
			onDouble(t, p, 7, func(m machine) { got, _ = train(t, p.Program, m, 5, 1e-2) })
			for i := range want {
				require.InEpsilon(t, want[i], got[i], 1e-2, fmt.Sprintf("step %d: %v, want %v", i+1, got, want))
			}
		})
	}
}
