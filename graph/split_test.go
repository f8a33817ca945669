package graph_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/progtext"
)

// splitProgram returns a program with a parameter of global shape (64,40). Each of four ranks has
// ten of its columns, and a flat shard of them along the other axis.
func splitProgram(t *testing.T) *graph.Program {
	text := strings.NewReplacer(
		"mesh data=4\n", "mesh model=4 data=4\n",
		"param fc.w [64,10]", "param fc.w [64,40]",
		"decay value", "decay split=1:0 value",
		"stride=1024\n", "stride=1024 axis=1 global=[1024] place=[replicate,shard]\n",
		"own -> value/fc {}", "own -> value/fc {Axis=1}",
	).Replace(sound)
	p, err := progtext.Parse(text)
	require.NoError(t, err)
	return p
}

func TestParametersSplitOverAnAxis(t *testing.T) {
	p := splitProgram(t)
	require.NoError(t, graph.VerifyStructure(p))
	q := &p.Params[0]
	require.Equal(t, []int64{64, 10}, p.LocalShape(q))
	require.Equal(t, int64(640), p.LocalElems(q))
	require.Equal(t, int64(2560), q.Elems())
	require.Contains(t, graph.Format(p), "param fc.w [64,40] normal std=0.02 unit=fc decay split=1:0 ")

	for _, bad := range []struct {
		change func(p *graph.Program)
		want   string
	}{
		{func(p *graph.Program) { p.Params[0].Split.Axis = 2 }, "parameter fc.w: is split along mesh axis 2, want 0 to 1"},
		{func(p *graph.Program) { p.Params[0].Split.Dim = 2 }, "parameter fc.w: is split in dimension 2, want one of the 2 of [64 40]"},
		{func(p *graph.Program) { p.Params[0].Shape[1] = 42 }, "parameter fc.w: is split in dimension 1 of [64 42] over 4 ranks, want equal parts"},
		{func(p *graph.Program) { p.Params[0].Split = nil }, "its value fc.w has shape [64 10], want the 2560 elements of [64 40]"},
		{func(p *graph.Program) { p.Params[0].Split.Axis, p.Units[0].Value.Axis = 1, 1 }, "along which state value of unit fc is in shards, want another axis"},
		{func(p *graph.Program) { p.Units[0].Segments[0].Len = 641 }, "want a part of its 640"},
		{func(p *graph.Program) {
			for id := range p.Buffers {
				if p.Buffers[id].Name == "own" {
					p.Buffers[id].Global[0] = 256
				}
			}
		}, "buffer own: 256 elements on each of 4 ranks that have a part each, want the 256 of global shape [256]"},
	} {
		p := splitProgram(t)
		bad.change(p)
		require.ErrorContains(t, graph.VerifyStructure(p), bad.want)
	}
}
