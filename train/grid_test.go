package train

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/grid"
	"github.com/spillway-ml/spillway/internal/testkit/layouts"
	"github.com/spillway-ml/spillway/internal/testkit/long"
	"github.com/spillway-ml/spillway/memplan"
	"github.com/spillway-ml/spillway/plan"
)

// gridConfig returns a run of 2 steps for a point of the grid.
func gridConfig(t testing.TB, p grid.Point, folders map[string]string) request {
	m := p.ModelOf(grid.Small)
	if folders[m.Name] == "" {
		folder, err := m.Write(t.TempDir())
		require.NoError(t, err)
		folders[m.Name] = folder
		tokens := make([]byte, 4000) // uint16 values below 100, the models' vocabulary
		for i := 0; i < len(tokens); i += 2 {
			tokens[i] = byte(i * i / 7 % 97)
		}
		require.NoError(t, os.WriteFile(filepath.Join(folder, "tokens.bin"), tokens, 0o644))
	}
	c := request{Config: config.Default()}
	c.Model, c.Data, c.Order, c.poison = folders[m.Name], filepath.Join(folders[m.Name], "tokens.bin"), "sequential", true
	c.Batch, c.Seq, c.Steps, c.Clip = m.Batch, m.Seq, 2, 1
	c.Ranks, c.Zero, c.Recompute, c.Offload, c.Disk = p.Ranks, p.Zero, p.Recompute, p.Offload, t.TempDir()
	return c
}

// TestTheGrid runs the points of the grid, half of them by default. The bits may depend only on the
// model and the number of ranks. In every memory space the highest touched byte must be the planned
// peak (checked by runOf). Every layout must be valid.
func TestTheGrid(t *testing.T) {
	t.Parallel()
	folders := map[string]string{}
	want := map[string]outcome{}
	for _, p := range long.Sample(1, 48, grid.Points()) {
		got := runPlanned(t, gridConfig(t, p, folders), func(built *plan.Plan) { layoutHolds(t, p, built) })
		world := fmt.Sprint(p.Model, p.Ranks)
		if _, ok := want[world]; !ok {
			want[world] = got
		}
		require.Equal(t, want[world].losses, got.losses, p)
		require.Equal(t, want[world].sha, got.sha, p)
	}
	require.Len(t, want, len(grid.Small)*len(grid.Ranks))
}

// layoutHolds checks that a layout passes the independent checker and that its peak is at most 2 %
// above the live bytes. The buffers are so small that alignment counts: pages on disk and for host
// memory used in disk transfers.
func layoutHolds(t testing.TB, p grid.Point, built *plan.Plan) {
	t.Helper()
	require.NoError(t, layouts.Check(built.Program, built.Layout), p)
	for sp, use := range built.Layout.Spaces {
		align := built.Layout.Align
		if p.Tier() == "disk" && graph.Space(sp) != graph.Device {
			align = memplan.DiskPage
		}
		var alive int64
		for _, id := range use.Live {
			alive += (built.Program.Buf(id).Bytes() + align - 1) / align * align
		}
		require.LessOrEqual(t, float64(use.Peak), 1.02*float64(alive), "%s: %s", p, graph.Space(sp))
	}
	require.Equal(t, p.Tier() == "disk", built.Layout.Spaces[graph.Disk].Peak > 0, p)
}
