package graph

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A test of the kernels' package compares the target's numbers with the kernels'.

func TestAddWorkspace(t *testing.T) {
	b := NewBuilder()
	b.Unit("u")
	x := b.Param("x", Normal(1), 6, 8)
	h := b.Linear("fc", x, b.Param("w", Normal(1), 8, 4), Value{}, LinearAttr{})
	h = b.Activation("act", h, ActSiLU)
	b.HeadLoss("loss", h, b.Param("head", Normal(1), 9, 4), b.Targets(6, 1))
	p, err := b.Program()
	require.NoError(t, err)
	p.Sections[0].Phases[0].Ops[0].Stream = HostWork
	before := len(p.Buffers)
	target := CPUTarget()

	q := AddWorkspace(p, target)
	require.Len(t, p.Buffers, before, "the input is left alone")
	seen := map[BufID]bool{}
	for i, op := range q.Sections[0].Phases[0].Ops {
		require.Equal(t, NoBuf, p.Sections[0].Phases[0].Ops[i].Work)
		n := target.Workspace(q, &op)
		if op.Kind == Activation {
			require.Zero(t, n)
			require.Equal(t, NoBuf, op.Work)
			continue
		}
		require.Positive(t, n)
		require.False(t, seen[op.Work], "workspace belongs to one operation")
		seen[op.Work] = true
		w := q.Buf(op.Work)
		require.Equal(t, Buffer{
			Name: op.Name + "/work", DType: U8, Shape: []int64{n}, Space: w.Space, Class: Workspace, Life: LifePhase, Unit: op.Unit,
		}, *w)
		require.Equal(t, op.Stream == HostWork, w.Space == Host)
		require.NoError(t, Check(q, &op))
	}
	require.Len(t, seen, 2)
	require.Equal(t, q, AddWorkspace(q, target), "what has its workspace keeps it")
}

// The head's logits and row sums come before its largest product's panels.
func TestHeadWorkspace(t *testing.T) {
	target := CPUTarget()
	for _, c := range []struct {
		rows, want int64
	}{
		{100, 100}, {256, 256}, {5000, 256}, // never more rows than a chunk
	} {
		b := NewBuilder()
		b.Unit("u")
		b.HeadLoss("loss", b.Input("x", c.rows, 64), b.Param("w", Normal(1), 1000, 64), b.Targets(c.rows, 1))
		p, err := b.Program()
		require.NoError(t, err)
		rows := c.want
		panels := 4*64*(rows+32) + 4*64*(1000+32) + 64 // A (rows,64) and B (64,1000), and alignment
		require.Equal(t, 4*rows*1000+roundUp(4*rows, 64)+roundUp(8*rows, 64)+panels, target.Workspace(p, &p.Sections[0].Phases[0].Ops[0]))
	}
}

// GPU kernels need other workspace than the CPU's. Operations on a GPU's host need the CPU's.
func TestWorkspaceOfAHostOperationIsTheCPUs(t *testing.T) {
	b := NewBuilder()
	b.Unit("u")
	b.Linear("fc", b.Input("x", 64, 1024), b.Param("w", Normal(1), 1024, 48), Value{}, LinearAttr{})
	p, err := b.Program()
	require.NoError(t, err)
	op := &p.Sections[0].Phases[0].Ops[0]
	target := CUDATarget()
	require.EqualValues(t, 4*64*48*4, target.Workspace(p, op), "4 parts of K")
	op.Stream = HostWork
	require.Equal(t, roundUp(CPUTarget().Workspace(p, op), target.Align), target.Workspace(p, op))
}

// A small product needs no workspace, and a large one at most the cap.
func TestProductWork(t *testing.T) {
	c := CUDATarget().CUDA
	for _, s := range []struct{ m, n, k, want int64 }{
		{64, 64, 64, 0}, {1 << 20, 1 << 20, 511, 0}, {0, 8, 4096, 0}, {8, 0, 4096, 0},
		{64, 32, 512, 4 * 64 * 32 * 2}, {64, 32, 1 << 20, 4 * 64 * 32 * 16},
		{4096, 4096, 4096, 32 << 20}, {1 << 40, 1 << 40, 4096, 32 << 20},
	} {
		require.Equal(t, s.want, c.ProductWork(s.m, s.n, s.k), "%+v", s)
	}
}

// Chunks of logits are multiples of a step and within the bound, for every vocabulary.
func TestHeadChunk(t *testing.T) {
	c := CUDATarget().CUDA
	for _, s := range []struct{ v, want int64 }{{256, 2048}, {32000, 2048}, {50257, 1280}, {128256, 512}, {1 << 20, 256}} {
		rows := c.HeadChunk(s.v)
		require.Equal(t, s.want, rows, "%d", s.v)
		require.True(t, rows == c.HeadStep || 4*rows*c.LogitStride(s.v) <= c.HeadBytes)
	}

	b := NewBuilder()
	b.Unit("u")
	b.HeadLoss("loss", b.Input("x", 5000, 768), b.Param("w", Normal(1), 50257, 768), b.Targets(5000, 1))
	p, err := b.Program()
	require.NoError(t, err)
	op := &p.Sections[0].Phases[0].Ops[0]
	target := CUDATarget()
	logits := int64(4*1280*50304 + 8*1280)
	require.Equal(t, logits+(32<<20), target.Workspace(p, op))
}
