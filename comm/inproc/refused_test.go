package inproc_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/graph"
)

func TestMismatchFailsOnEveryRank(t *testing.T) {
	cases := []struct {
		name string
		bind func(j *job, r int, g comm.Group) (device.Kernel, error)
		want []string
	}{
		{"size", func(j *job, r int, g comm.Group) (device.Kernel, error) {
			n := int64(64)
			if r == 2 {
				n = 128
			}
			return g.AllReduce("grad", j.ptr(r, 0, n), graph.F32, graph.SumTree)
		}, []string{"rank 0 runs all_reduce of 64 bytes of f32", "rank 2 runs all_reduce of 128 bytes of f32"}},
		{"dtype", func(j *job, r int, g comm.Group) (device.Kernel, error) {
			d := graph.F32
			if r == 1 {
				d = graph.I64
			}
			return g.AllReduce("grad", j.ptr(r, 0, 64), d, graph.SumTree)
		}, []string{"of f32", "rank 1 runs all_reduce of 64 bytes of i64"}},
		{"operation", func(j *job, r int, g comm.Group) (device.Kernel, error) {
			if r == 1 {
				return g.AllGather("h.0/ag", j.ptr(r, 0, 16), j.ptr(r, 16, 48), graph.F32)
			}
			return g.ReduceScatter("h.0/rs", j.ptr(r, 16, 48), j.ptr(r, 0, 16), graph.F32, graph.SumTree, false)
		}, []string{`reduce_scatter of 48 bytes of f32 ("h.0/rs", call 1)`, `rank 1 runs all_gather of 48 bytes of f32 ("h.0/ag", call 1)`}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			j := newJob(t, ranks(3), 256, time.Minute)
			j.launch(func(r int, g comm.Group) (device.Kernel, error) { return c.bind(j, r, g) })
			for r, err := range j.errs() {
				require.ErrorIs(t, err, comm.ErrMismatch, "rank %d", r)
				for _, w := range c.want {
					require.ErrorContains(t, err, w)
				}
			}
		})
	}
}

func TestSendRecvMismatch(t *testing.T) {
	j := newJob(t, ranks(2), 256, time.Minute)
	s, err := j.group(0, -1).Send("s", j.ptr(0, 0, 64), graph.F32, 1)
	require.NoError(t, err)
	r, err := j.group(1, -1).Recv("r", j.ptr(1, 0, 32), graph.F32, 0)
	require.NoError(t, err)
	require.NoError(t, j.streams[0].Launch(s))
	require.NoError(t, j.streams[1].Launch(r))
	for _, err := range j.errs() {
		require.ErrorIs(t, err, comm.ErrMismatch)
		require.ErrorContains(t, err, `rank 0 sends send_recv of 64 bytes of f32 ("s"), rank 1 receives send_recv of 32 bytes of f32 ("r")`)
	}
}

func TestLostRankIsNamedOnEveryRank(t *testing.T) {
	j := newJob(t, ranks(4), 64, 50*time.Millisecond)
	reduce := func(rank int, g comm.Group) (device.Kernel, error) {
		return g.AllReduce("h.3/ar", j.ptr(rank, 0, 64), graph.F32, graph.SumTree)
	}
	j.launch(reduce)
	j.sync()
	j.streams[2] = idle{j.streams[2]} // rank 2 misses the second call
	j.launch(reduce)
	for r, err := range j.errs() {
		require.ErrorIs(t, err, comm.ErrTimeout, "rank %d", r)
		require.ErrorContains(t, err, `all_reduce "h.3/ar" (call 2 of the world group): rank 2 did not arrive within 50ms; ranks 0, 1, 3 waited`)
	}
}

// idle is the stream of a lost rank: Launch does nothing.
type idle struct{ device.Stream }

func (idle) Launch(device.Kernel) error { return nil }

func TestLostPeerOfASend(t *testing.T) {
	j := newJob(t, ranks(2), 64, 30*time.Millisecond)
	s, err := j.group(0, -1).Send("stage 1", j.ptr(0, 0, 64), graph.F32, 1)
	require.NoError(t, err)
	require.NoError(t, j.streams[0].Launch(s))
	for _, err := range j.errs() {
		require.ErrorIs(t, err, comm.ErrTimeout)
		require.ErrorContains(t, err, `send "stage 1" (world group): rank 1 did not come within 30ms; rank 0 waited`)
	}
}

func TestAbortReleasesEveryWaiterAndFollower(t *testing.T) {
	j := newJob(t, ranks(3), 64, time.Minute)
	for r := range 2 {
		k, err := j.group(r, -1).AllReduce("ar", j.ptr(r, 0, 64), graph.F32, graph.SumTree)
		require.NoError(t, err)
		require.NoError(t, j.streams[r].Launch(k))
	}
	boom := errors.New("boom")
	begin := time.Now()
	time.AfterFunc(20*time.Millisecond, func() { j.group(2, -1).Abort(boom) })
	for r, err := range j.errs()[:2] {
		require.ErrorIs(t, err, boom, "rank %d", r)
		require.ErrorIs(t, err, comm.ErrAborted)
	}
	require.Less(t, time.Since(begin), 5*time.Second)
	k, err := j.group(2, -1).Barrier("late")
	require.NoError(t, err)
	_ = j.streams[2].Launch(k)
	require.ErrorIs(t, j.streams[2].Sync(), boom)
	require.ErrorIs(t, j.group(0, 0).Err(), boom, "an axis's group ends with the world's")
	j.group(1, -1).Abort(errors.New("later"))
	require.ErrorIs(t, j.world.Err(), boom, "the first error stays")
}

func TestBadOperandsAreRefused(t *testing.T) {
	j := newJob(t, ranks(2), 256, time.Minute)
	g := j.group(1, -1)
	check := func(_ device.Kernel, err error, want string) {
		t.Helper()
		require.ErrorContains(t, err, want)
	}
	k, err := g.AllGather("a", j.ptr(1, 0, 16), j.ptr(1, 64, 48), graph.F32)
	check(k, err, "the full buffer has 48 bytes, want 2 ranks × the shard's 16")
	k, err = g.AllGather("a", j.ptr(1, 64, 16), j.ptr(1, 64, 32), graph.F32)
	check(k, err, "the shard at byte 0 of the full buffer is not the part of rank 1, at byte 16")
	k, err = g.ReduceScatter("a", j.ptr(1, 64, 32), j.ptr(1, 80, 16), graph.F32, graph.SumTree, true)
	check(k, err, "want them apart")
	k, err = g.AllGather("a", j.ptr(1, 0, 6), j.ptr(1, 64, 12), graph.F32)
	check(k, err, "not a whole number of f32 elements")
	k, err = g.AllReduce("a", j.ptr(1, 250, 16), graph.F32, graph.SumTree)
	check(k, err, "outside the device arena of 256 bytes")
	k, err = g.AllReduce("a", j.ptr(1, 2, 16), graph.F32, graph.SumTree)
	check(k, err, "don't divide into elements of 4 bytes")
	k, err = g.Broadcast("a", j.ptr(1, 0, 16), graph.F32, 2)
	check(k, err, "root 2 of 2 ranks")
	k, err = g.AllToAll("a", j.ptr(1, 0, 16), j.ptr(1, 8, 16), graph.F32)
	check(k, err, "apart")
	k, err = g.AllReduce("a", j.ptr(1, 0, 16), graph.F32, graph.SumSequential)
	check(k, err, "no sum in the order sequential, want tree")
	k, err = g.ReduceScatter("a", j.ptr(1, 64, 32), j.ptr(1, 0, 16), graph.F32, graph.NumSumOrders, false)
	check(k, err, "no sum in the order")
	k, err = g.ReduceScatter("a", j.ptr(1, 64, 32), j.ptr(1, 0, 8), graph.F64, graph.SumSequential, false)
	check(k, err, "no sum of f64 in the order sequential, want f32, bf16 or f16")
	k, err = g.ReduceScatter("a", j.ptr(1, 64, 32), j.ptr(1, 0, 16), graph.BF16, graph.SumSequential, false)
	check(k, err, "the full buffer has 32 bytes of bf16, want 2 ranks × the elements of the shard, which has 16 bytes of f32")
	k, err = g.ReduceScatter("a", j.ptr(1, 64, 32), j.ptr(1, 80, 16), graph.F32, graph.SumSequential, false)
	check(k, err, "the shard lies in the full buffer, want them apart")
}

// Two streams of one rank must not use one group concurrently: it would be random which of their
// operations meets which of a peer's.
func TestTwoStreamsOfOneRankAreRefused(t *testing.T) {
	j := newJob(t, ranks(2), 64, time.Minute)
	other, err := j.ctx[0].NewStream(graph.Compute)
	require.NoError(t, err)
	for _, s := range []device.Stream{j.streams[0], other} {
		k, err := j.group(0, -1).Barrier("b")
		require.NoError(t, err)
		require.NoError(t, s.Launch(k))
	}
	require.ErrorContains(t, other.Sync(), "rank 0 runs two operations of its world group at once")
}
