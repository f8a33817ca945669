package run

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/model"
	"github.com/spillway-ml/spillway/offload"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/platform"
	"github.com/spillway-ml/spillway/zero"
)

// memory holds a rank's buffers on the heap.
type memory map[graph.BufID][]byte

func (m memory) at(buf graph.BufID, off int64, n int) ([]byte, error) {
	for int64(len(m[buf])) < off+int64(n) {
		m[buf] = append(m[buf], 0)
	}
	return m[buf][off : off+int64(n)], nil
}

func (m memory) Write(buf graph.BufID, off int64, data []byte) error {
	at, err := m.at(buf, off, len(data))
	copy(at, data)
	return err
}

func (m memory) Read(buf graph.BufID, off int64, data []byte) error {
	at, err := m.at(buf, off, len(data))
	copy(data, at)
	return err
}

func sharded(t require.TestingT, ranks int, stage zero.Stage, int8 bool) *graph.Program {
	fwd, err := model.Build(model.Config{Family: model.GPT2, Layers: 2, Heads: 2, Width: 32, Vocab: 67, Positions: 16, TiedHead: true}, model.Train, 1, 8)
	require.NoError(t, err)
	p, err := plan.Build(plan.Forward{Train: fwd}, plan.Config{Ranks: ranks, Stage: stage, Accum: 1, Optimizer: zero.Optimizer{Name: "adamw", Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Int8: int8}, Target: graph.CPUTarget()})
	require.NoError(t, err)
	return p.Program
}

// Elements of a state that were written are read back, at any world size and stage and for any
// range. Each rank holds only its part, and reading a part that another process holds is an error.
func TestStatesByElement(t *testing.T) {
	programs := map[string]*graph.Program{}
	rapid.Check(t, func(t *rapid.T) {
		ranks := rapid.IntRange(1, 5).Draw(t, "ranks")
		stage := rapid.IntRange(0, 3).Draw(t, "stage")
		key := fmt.Sprint(ranks, stage)
		if programs[key] == nil {
			programs[key] = sharded(t, ranks, zero.Stage(stage), false)
		}
		p := programs[key]
		all := map[int]Holder{}
		for r := range ranks {
			all[r] = memory{}
		}
		s := NewStates(p, platform.OneProcess(ranks), all)
		param := rapid.IntRange(0, len(p.Params)-1).Draw(t, "param")
		state := rapid.SampledFrom([]string{"value", "exp_avg"}).Draw(t, "state")
		n := p.Params[param].Elems()
		from := rapid.Int64Range(0, n-1).Draw(t, "from")
		v := make([]float32, rapid.Int64Range(1, n-from).Draw(t, "n"))
		for i := range v {
			v[i] = float32(from) + float32(i) + 1
		}
		require.NoError(t, s.Write(param, state, from, v))
		got := make([]float32, len(v))
		require.NoError(t, s.Read(param, state, from, got))
		require.True(t, bytes.Equal(Float32Bytes(v), Float32Bytes(got)))

		at := int64(0)
		require.NoError(t, s.Extents(param, state, from, int64(len(v)), func(e Extent) error {
			require.Equal(t, at, e.From, "in order, without gaps")
			require.NotEmpty(t, e.Holders)
			at = e.To
			return nil
		}))
		require.Equal(t, int64(len(v)), at)

		// The same, in a process that has only the last rank.
		mine := NewStates(p, platform.World{Size: ranks, Local: []int{ranks - 1}}, map[int]Holder{ranks - 1: all[ranks-1]})
		err := mine.Extents(param, state, from, int64(len(v)), func(e Extent) error {
			part := make([]float32, e.To-e.From)
			err := mine.Read(param, state, from+e.From, part)
			if e.Holders[len(e.Holders)-1] == ranks-1 {
				require.NoError(t, err)
				require.Equal(t, v[e.From:e.To], part)
			} else {
				require.ErrorIs(t, err, ErrRemote)
			}
			return nil
		})
		require.NoError(t, err)
	})
}

// 8-bit states are written in complete blocks and read from any element. The codes and the scales
// of a range are in two buffers.
func TestQuantisedStatesByElement(t *testing.T) {
	const ranks = 3
	for stage := range 4 {
		p := sharded(t, ranks, zero.Stage(stage), true)
		all := map[int]Holder{}
		for r := range ranks {
			all[r] = memory{}
		}
		s := NewStates(p, platform.OneProcess(ranks), all)
		param := slices.IndexFunc(p.Params, func(q graph.Param) bool { return q.Name == "h.1.mlp.c_fc.weight" })
		v := make([]float32, p.Params[param].Elems())
		for i := range v {
			v[i] = float32(i%graph.QuantBlock+1) / graph.QuantBlock * float32(i/graph.QuantBlock+1)
		}
		require.NoError(t, s.Write(param, "exp_avg", 0, v))
		for _, at := range []int{0, 1, 255, 256, 300, 1111} {
			got := make([]float32, min(777, len(v)-at))
			require.NoError(t, s.Read(param, "exp_avg", int64(at), got))
			for i := range got {
				require.InEpsilon(t, v[at+i], got[i], 0.2, "stage %d, element %d", stage, at+i)
			}
		}
		require.ErrorContains(t, s.Write(param, "exp_avg", 100, v[:10]), "by blocks of 256")
	}
}

// 8-bit states on any tier have their scales listed as a state of the program, so that a checkpoint
// saves both.
func TestQuantisedStatesHaveScalesWhereverTheyRest(t *testing.T) {
	fwd, err := model.Build(model.Config{Family: model.GPT2, Layers: 2, Heads: 2, Width: 32, Vocab: 67, Positions: 16, TiedHead: true}, model.Train, 1, 8)
	require.NoError(t, err)
	for _, where := range []string{"host", "disk", "disk:50%"} {
		for stage := range 4 {
			o, err := offload.Parse("optimizer=" + where)
			require.NoError(t, err)
			p, err := plan.Build(plan.Forward{Train: fwd}, plan.Config{Ranks: 2, Stage: zero.Stage(stage), Accum: 1, Offload: o,
				Optimizer: zero.Optimizer{Name: "adamw", Beta1: 0.9, Beta2: 0.95, Eps: 1e-8, Int8: true}, Target: graph.CPUTarget()})
			require.NoError(t, err)
			s, states := NewStates(p.Program, platform.OneProcess(2), nil), 0
			for i := range p.Program.Params {
				for _, st := range s.Names(i) {
					if st.Name == valueState {
						continue
					}
					states++
					values, scales := p.Program.Buf(st.Buf), p.Program.ScalesOf(st.Buf)
					require.Equal(t, graph.U8, values.DType)
					require.NotEqual(t, graph.NoBuf, scales, "%s at stage %d: %s", where, stage, values.Name)
					require.Equal(t, values.View.Base, p.Program.Buf(scales).View.Base)
					require.Equal(t, values.Space, p.Program.Buf(scales).Space)
				}
			}
			require.Equal(t, 2*len(p.Program.Params), states)
			_, _, err = PartBytes(p.Program, 2)
			require.NoError(t, err)
		}
	}
}

func TestWorld(t *testing.T) {
	require.NoError(t, platform.OneProcess(3).Check())
	require.True(t, platform.OneProcess(3).IsLocal(2))
	require.False(t, platform.OneProcess(3).IsLocal(3))
	w := platform.World{Size: 4, Local: []int{1, 3}}
	require.NoError(t, w.Check())
	require.False(t, w.IsLocal(2))
	for _, bad := range []platform.World{{}, {Size: 2}, {Size: 2, Local: []int{2}}, {Size: 2, Local: []int{-1}}, {Size: 3, Local: []int{1, 0}}, {Size: 3, Local: []int{1, 1}}} {
		require.Error(t, bad.Check(), "%+v", bad)
	}
}
