//go:build linux

package cuda

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/optest"
	"github.com/spillway-ml/spillway/kernels"
	"github.com/spillway-ml/spillway/kernels/cpu/exact"
)

// nowhere is device memory that has addresses but no contents.
type nowhere struct{ size int64 }

func (n *nowhere) Space() graph.Space      { return graph.Device }
func (n *nowhere) Size() int64             { return n.size }
func (n *nowhere) Touched() int64          { return 0 }
func (n *nowhere) Address() driver.Address { return 1 << 40 }

// bindNowhere binds an operation whose workspace is smaller by less bytes than the program says.
func (b *bench) bindNowhere(p *graph.Program, op *graph.Op, less int64) error {
	arena := &nowhere{}
	kb := kernels.Binding{Program: p, Op: op, Coord: make([]int, len(p.Mesh))}
	ptr := func(id graph.BufID) device.Ptr {
		if id == graph.NoBuf {
			return device.Ptr{}
		}
		n := p.Buf(id).Bytes()
		at := device.Ptr{Arena: arena, Off: arena.size, Len: n}
		arena.size += roundUp(n, workAlign)
		return at
	}
	places := map[graph.BufID]device.Ptr{}
	once := func(id graph.BufID) device.Ptr {
		if _, ok := places[id]; !ok {
			places[id] = ptr(id)
		}
		return places[id]
	}
	for _, id := range op.In {
		kb.In = append(kb.In, once(id))
	}
	for _, o := range op.Out {
		kb.Out = append(kb.Out, once(o.Buf))
	}
	if op.Work != graph.NoBuf {
		p.Buf(op.Work).Shape[0] -= less
		kb.Work = once(op.Work)
	}
	_, err := b.lib.Bind(kb)
	return err
}

// TestWorkspaceOfTarget: graph.CUDATarget's numbers equal the kernels' needs. At shapes up to their
// bounds, every operation binds with the target's workspace, and none with one piece less.
func TestWorkspaceOfTarget(t *testing.T) {
	target := graph.CUDATarget()
	require.EqualValues(t, exact.Limbs, target.Limbs)
	require.EqualValues(t, workAlign, target.Align)
	require.EqualValues(t, sumPiece, target.SumElems)
	b := newBench(t)
	rng := rand.New(rand.NewPCG(3, 3))
	needed := map[graph.Kind]bool{}
	for _, kind := range optest.Everywhere() {
		for range 12 {
			p, op, ok := optest.Big(kind, rng, optest.Options{Target: target})
			if !ok {
				o := drawn(kind, rng, optest.Options{Target: target, Aligned: true})
				if kind == graph.BiasGrad {
					n, c := 1+rng.Int64N(20000), 1+rng.Int64N(9)
					o = optest.Of(kind, nil, [][]int64{{n, c}}, [][]int64{{c}}, 1, rng, optest.Options{Target: target})
				}
				p, op = o.P, o.Op()
				op.Skip = graph.NoBuf
			} else {
				p.Sections = []graph.Section{{Name: "s", Phases: []graph.Phase{{Name: "p", Repeat: 1, Ops: []graph.Op{*op}}}}}
				p = graph.AddWorkspace(p, target)
				op = &p.Sections[0].Phases[0].Ops[0]
			}
			require.NoError(t, b.bindNowhere(p, op, 0), "%s", shapesIn(p))
			if op.Work != graph.NoBuf {
				needed[kind] = true
				require.ErrorContains(t, b.bindNowhere(p, op, workAlign), "workspace has", "%s %s", kind, shapesIn(p))
			}
		}
	}
	for _, kind := range []graph.Kind{
		graph.Linear, graph.LinearAct, graph.LinearGradX, graph.LinearGradAct, graph.LinearGradW, graph.LinearGradWB, graph.BiasGrad, graph.AttentionGrad,
		graph.CrossEntropy, graph.HeadLoss, graph.HeadLossGrad, graph.Sum, graph.Rope,
	} {
		require.True(t, needed[kind], "%s never needed workspace", kind)
	}
}

func shapesIn(p *graph.Program) string { return shapesOf(&optest.Operation{P: p}) }
