package meet_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/comm/meet"
	"github.com/spillway-ml/spillway/comm/world"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
)

// bare is a transport whose operations transfer no data.
type bare struct{ *meet.Member }

type kernel struct{ *meet.Op }

func (bare) Bind(o *meet.Op) (device.Kernel, error) { return &kernel{o}, nil }

func join(m *meet.Member) meet.Binder { return bare{m} }

func TestMembersAlongAMesh(t *testing.T) {
	mesh := []graph.Axis{{Name: "a", Size: 2}, {Name: "b", Size: 3}}
	w, err := meet.New("bare", mesh, 0, join)
	require.NoError(t, err)
	require.Equal(t, 6, w.Size())
	for rank := range 6 {
		all, err := w.Members(rank)
		require.NoError(t, err)
		require.Len(t, all, 3)
		require.Equal(t, rank, all[0].Rank())
		for axis, i := range comm.Coord(mesh, rank) {
			require.Equal(t, i, all[axis+1].Rank())
			require.Equal(t, mesh[axis].Size, all[axis+1].Size())
			require.Equal(t, rank, all[axis+1].GlobalRank())
		}
		require.Equal(t, world.DefaultTimeout, all[0].Timeout())
	}
	_, err = w.Members(6)
	require.EqualError(t, err, "bare: rank 6 of 6 ranks")
	_, err = meet.New("bare", []graph.Axis{{Name: "a"}}, 0, join)
	require.EqualError(t, err, "bare: mesh axis 0 (a) has size 0, want at least 1")
}

// A rank can be late for any run of an operation, not only the first. The timeout then names it.
func TestASecondMeetingNamesWhoIsMissing(t *testing.T) {
	w, err := meet.New("bare", []graph.Axis{{Name: "data", Size: 2}}, 30*time.Millisecond, join)
	require.NoError(t, err)
	var ops [2]*kernel
	for r := range ops {
		members, err := w.Members(r)
		require.NoError(t, err)
		k, err := members[0].Barrier("b")
		require.NoError(t, err)
		ops[r] = k.(*kernel)
		ops[r].Begin()
	}
	first := make(chan error)
	go func() { first <- ops[1].Meet(true) }()
	require.NoError(t, ops[0].Meet(true))
	require.NoError(t, <-first)
	require.Same(t, ops[1], ops[0].Met(1))
	err = ops[0].Meet(false)
	require.ErrorIs(t, err, comm.ErrTimeout)
	require.EqualError(t, err, `timeout: barrier "b" (call 1 of the world group): rank 1 did not arrive within 30ms; rank 0 waited`)
	require.Equal(t, err, ops[1].Meet(true), "an operation of an ended world fails with its error")
}

func TestSharesPartTheBuffer(t *testing.T) {
	for _, n := range []int64{0, 1, 15, 16, 100, 1000} {
		for w := int64(1); w < 6; w++ {
			var next int64
			for i := range w {
				from, to := comm.Share(n, i, w)
				require.Equal(t, next, from)
				require.Zero(t, from%16)
				require.LessOrEqual(t, from, to)
				next = to
			}
			require.Equal(t, n, next)
		}
	}
}
