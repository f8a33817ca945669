package planning_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/progtext"
	"github.com/spillway-ml/spillway/zero"
)

// plan --dump writes a readable program for each pass and its difference, which is empty if nothing
// changed. A folder that is not empty is rejected.
func TestPlanDump(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "passes")
	args := []string{"plan", "--model", testdata + "/gpt2", "--ranks", "2", "--batch", "1", "--seq", "8", "--recompute", "full", "--effort", "1", "--dump", dir}
	r := command(args...)
	require.Equal(t, 0, r.status, r.stderr)
	list, err := filepath.Glob(filepath.Join(dir, "*.txt"))
	require.NoError(t, err)
	require.Equal(t, "00-model.txt", filepath.Base(list[0]))
	before := ""
	for _, path := range list {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		p, err := progtext.Parse(string(text), zero.Operations()...)
		require.NoError(t, err, path)
		require.Equal(t, string(text), graph.Format(p), path)
		if before != "" {
			diff, err := os.ReadFile(strings.TrimSuffix(path, ".txt") + ".diff")
			require.NoError(t, err)
			require.Equal(t, before == string(text), len(diff) == 0, path)
		}
		before = string(text)
	}
	last, err := progtext.Parse(before, zero.Operations()...)
	require.NoError(t, err)
	require.NoError(t, graph.Verify(last))

	r = command(args...)
	require.Equal(t, 1, r.status)
	require.Contains(t, r.stderr, "is not empty; name a new folder")
}
