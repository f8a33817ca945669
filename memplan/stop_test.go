package memplan

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
)

// If its stop function returns an error, Assign does no more work and returns that error, wherever
// this happens.
func TestAssignStops(t *testing.T) {
	p := Transformer(24, 64, 128, 512, 4, 1, 2, false)
	enough := errors.New("enough")
	asked, until := 0, 1<<30
	stop := func() error {
		if asked++; asked > until {
			return enough
		}
		return nil
	}
	want, err := Assign(p, Options{})
	require.NoError(t, err)
	got, err := Assign(p, Options{Stop: stop})
	require.NoError(t, err)
	require.Equal(t, want, got)
	all := asked
	require.Greater(t, all, 8)
	for until = range all {
		asked = 0
		_, err := Assign(p, Options{Stop: stop})
		require.ErrorIs(t, err, enough)
		require.Equal(t, until+1, asked, "nobody is asked again")
	}
}

// TestWorkDoesNotDependOnTheWidth counts the work of planning instead of seconds: steps, buffers,
// live ranges, and pairs of buffers that overlap. A model 16 times as wide has the same counts. A
// different ranking of its buffers may win, so the work of placement itself is only bounded.
func TestWorkDoesNotDependOnTheWidth(t *testing.T) {
	type count struct{ steps, buffers, ranges, clashes int }
	var want count
	for i, width := range []int64{1024, 4096, 16384} {
		p := Transformer(48, width, 1024, 50304, 8, 1, 2, true)
		a, err := Analyse(p)
		require.NoError(t, err)
		a.overlap(DefaultAlign)
		got := count{buffers: len(p.Buffers)}
		for s := range a.sections {
			got.steps += len(a.sections[s].trace.Steps)
			got.ranges += len(a.sections[s].ranges)
		}
		sp := &a.spaces[graph.Device]
		for i := range sp.ids {
			for j := range i {
				if sp.between(int32(i), int32(j)) {
					got.clashes++
				}
			}
		}
		if i == 0 {
			want = got
		}
		require.Equal(t, want, got, "width %d", width)
		_, _, err = a.place(graph.Device, a.bound[graph.Device].bytes-a.residentBytes[graph.Device], Options{})
		require.NoError(t, err)
		work := a.work[graph.Device]
		require.Positive(t, work)
		t.Logf("width %d: %+v, %d pairs", width, got, work)
		require.Less(t, work, int64(1.2*maxWork))
	}
}
