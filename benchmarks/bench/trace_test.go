package bench

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
)

// Spans by hand: 10 to 30 of the copy lies under 0–20 and 25–40.
func TestOverlaps(t *testing.T) {
	got := Overlaps([]Span{
		{Stream: "compute", Start: 25, End: 40}, {Stream: "compute", Start: 0, End: 20}, {Rank: 1, Stream: "compute", Start: 20, End: 25},
		{Stream: "copy-in", Start: 10, End: 30}, {Stream: "copy-in", Start: 50, End: 51}, {Stream: "host", Start: 1, End: 2},
	})
	require.Equal(t, []Overlap{{"copy-in", 21, 15}, {"host", 1, 1}}, got)
}

// The trace of a run shows updates and their disk traffic under computing. How
// much depends on what else the machine does, so a few runs may try; without the
// overlap it is none in each of them.
func TestTraceShowsCopiesUnderCompute(t *testing.T) {
	model := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(model, "config.json"), []byte(
		`{"model_type":"gpt2","n_layer":4,"n_head":4,"n_embd":128,"vocab_size":512,"n_positions":64}`), 0o644))
	const tries = 5
	for _, clip := range []float64{0, 1} { // during backward; beside the next forward
		missing := []string{"host", "disk-in", "disk-out"}
		for range tries {
			streams := tracedRun(t, model, clip)
			missing = slices.DeleteFunc(missing, func(stream string) bool {
				o := streams[stream]
				return o.Hidden > 0.01*o.Busy
			})
			if len(missing) == 0 {
				break
			}
			t.Log(clip, streams)
		}
		require.Empty(t, missing, "clip %g: never under computing in %d runs", clip, tries)
	}
}

// tracedRun trains with the optimizer on disk and returns what its trace shows
// by stream.
func tracedRun(t *testing.T, model string, clip float64) map[string]Overlap {
	t.Helper()
	c := spillway.Default()
	c.Model, c.Data, c.Order = model, "../../testdata/text.bin", "sequential"
	c.Batch, c.Seq, c.Steps, c.Clip, c.Threads = 4, 64, 8, clip, 2
	c.Offload, c.Disk, c.Trace = "optimizer=disk", t.TempDir(), filepath.Join(t.TempDir(), "trace.json")
	tr, err := spillway.New(context.Background(), c)
	require.NoError(t, err)
	require.NoError(t, tr.Run(context.Background(), nil))
	require.NoError(t, tr.Close())
	events, err := ReadTrace(c.Trace)
	require.NoError(t, err)
	streams := map[string]Overlap{}
	for _, o := range Overlaps(events) {
		streams[o.Stream] = o
	}
	return streams
}
