package offload_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/fsdp"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/layouts"
	"github.com/spillway-ml/spillway/memplan"
	"github.com/spillway-ml/spillway/offload"
)

// before reports whether operation a of section "step" has always finished when operation b starts.
func before(t *testing.T, q *graph.Program, a, b string) bool {
	t.Helper()
	regions, err := graph.NewRegions(q)
	require.NoError(t, err)
	tr, err := graph.NewTrace(q, regions, q.Section("step"))
	require.NoError(t, err)
	at := func(name string) int {
		for i := range tr.Steps {
			if tr.Op(i).Name == name {
				return i
			}
		}
		require.Fail(t, "no operation "+name)
		return -1
	}
	return tr.Before(at(a), at(b))
}

// names lists the section's operations on a stream whose names contain a text.
func names(q *graph.Program, section string, stream graph.StreamID, suffix string) (list []string) {
	sec := q.Section(section)
	if sec == nil {
		return nil
	}
	for _, ph := range sec.Phases {
		for _, op := range ph.Ops {
			if op.Stream == stream && strings.Contains(op.Name, suffix) {
				list = append(list, op.Name)
			}
		}
	}
	return list
}

// Without clipping and loss scaling, a layer's update runs as soon as its gradient is reduced. The
// backward of the layer below, and its gradient, do not wait for the update.
func TestUpdateDuringBackward(t *testing.T) {
	for _, accum := range []int{1, 2} {
		q := rewrite(t, sharded(t, 3, 1, fsdp.Options{Accum: accum}), offload.Options{Optimizer: graph.Host, Ahead: 1})
		require.Nil(t, q.Section("flush"))
		require.Equal(t, []string{"norm/adamw", "h.2/adamw", "h.1/adamw", "h.0/adamw", "pos/adamw", "embed/adamw"}, names(q, "step", graph.HostWork, "adamw"))
		for _, ph := range q.Section("step").Phases {
			for _, op := range ph.Ops {
				require.False(t, op.Kind == "adamw" && ph.Name != "only" && ph.Name != "last", "%s in %s", op.Name, ph.Name)
			}
		}
		require.False(t, before(t, q, "h.2/adamw", "h.1.ln_1/dx"), "the backward of the next layer runs beside the update")
	}
}

// With clipping, a unit's update moves to the next step's forward. It runs beside the units before
// its own, and finishes before its own forward.
func TestUpdateBesideTheNextForward(t *testing.T) {
	p := sharded(t, 4, 1, fsdp.Options{Clip: 1})
	require.Nil(t, rewrite(t, p, offload.Options{Optimizer: graph.Host, Ahead: 0}).Section("flush"), "with nothing ahead updates take their turn")
	q := rewrite(t, p, offload.Options{Optimizer: graph.Host, Ahead: 1})
	order := []string{"embed/adamw", "pos/adamw", "h.0/adamw", "h.1/adamw", "h.2/adamw", "h.3/adamw", "norm/adamw"}
	require.Equal(t, order, names(q, "step", graph.HostWork, "adamw"))
	require.Equal(t, order, names(q, "flush", graph.HostWork, "adamw"))
	for i := range 4 {
		own, next := fmt.Sprintf("h.%d/adamw", i), fmt.Sprintf("h.%d.mlp.c_fc", i)
		require.True(t, before(t, q, own, next), "%s is fenced before %s", own, next)
		if i > 0 {
			require.False(t, before(t, q, own, fmt.Sprintf("h.%d.attn.c_attn", i-1)), "%s runs beside the unit before", own)
		}
	}
	for _, op := range append([]string(nil), order...) {
		for _, ph := range q.Section("step").Phases {
			for _, o := range ph.Ops {
				if o.Name == op {
					require.NotEqual(t, graph.NoBuf, o.Skip, "%s waits for something to update", op)
				}
			}
		}
	}
}

// Only each rank's reduced gradient waits for the deferred update, in host memory. Gradients on the
// device live no longer than without the overlap.
func TestPendingGradientsLieOnTheHost(t *testing.T) {
	for _, ranks := range []int{1, 2} {
		plain, err := layouts.Assign(rewrite(t, sharded(t, 4, ranks, fsdp.Options{Stage: 2, Clip: 1}), offload.Options{}), memplan.Options{})
		require.NoError(t, err)
		q := rewrite(t, sharded(t, 4, ranks, fsdp.Options{Stage: 2, Clip: 1}), offload.Options{Optimizer: graph.Host, Ahead: 1})
		l, err := layouts.Assign(q, memplan.Options{})
		require.NoError(t, err)
		var shards int64
		for _, u := range q.Units {
			shards += 4 * u.States[0].Len
		}
		host := l.Spaces[graph.Host]
		require.Equal(t, shards, host.ClassPeak[graph.Gradients]+padding(q, "pending/"))
		require.LessOrEqual(t, l.Spaces[graph.Device].ClassPeak[graph.Gradients], plain.Spaces[graph.Device].ClassPeak[graph.Gradients])
	}
}

func padding(q *graph.Program, prefix string) (n int64) {
	for i := range q.Buffers {
		if strings.HasPrefix(q.Buffers[i].Name, prefix) {
			n += q.Buffers[i].Pad
		}
	}
	return n
}

// Without accumulation a gradient is updated where it is made and does not go to its tier and back.
// Only the gradient of the tied embedding does, because it has two parts.
func TestGradientsThatAreUpdatedAtOnceStay(t *testing.T) {
	q := rewrite(t, sharded(t, 3, 1, fsdp.Options{}), offload.Options{Optimizer: graph.Disk, Gradients: graph.Disk, Ahead: 1})
	require.Equal(t, []string{"grad/embed/store"}, names(q, "step", graph.DiskOut, "grad/"))
	q = rewrite(t, sharded(t, 3, 1, fsdp.Options{Accum: 2}), offload.Options{Optimizer: graph.Disk, Gradients: graph.Disk, Ahead: 1})
	require.Greater(t, len(names(q, "step", graph.DiskOut, "grad/")), 5)
}

// Two bounce buffers alternate between disk and device. The load of a piece waits for the fetch of
// the piece two before it, not for the fetch of the last. With Ahead 0 there is one buffer.
func TestTwoBounceBuffers(t *testing.T) {
	for ahead := range 3 {
		q := rewrite(t, sharded(t, 2, 1, fsdp.Options{}), offload.Options{Parameters: graph.Disk, Ahead: ahead, Chunk: 4096})
		loads, fetches := names(q, "step", graph.DiskIn, "value/h.1/load"), names(q, "step", graph.CopyIn, "value/h.1/fetch")
		require.Greater(t, len(loads), 8)
		require.Equal(t, len(loads), len(fetches))
		buffers := min(ahead, 1) + 1
		for k := buffers; k < 6; k++ {
			require.True(t, before(t, q, fetches[k-buffers], loads[k]))
			if buffers > 1 {
				require.False(t, before(t, q, fetches[k-1], loads[k]), "load %d runs beside the fetch before it", k)
			}
		}
		l, err := layouts.Assign(q, memplan.Options{})
		require.NoError(t, err)
		require.LessOrEqual(t, l.Spaces[graph.Host].Peak, (2*int64(buffers)+1)*4*4096, "so many a direction, and what odd last pieces cost")
	}
}
