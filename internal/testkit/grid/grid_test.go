package grid

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/model"
)

func TestTheGridIsWhole(t *testing.T) {
	seen := map[string]bool{}
	for _, p := range Points() {
		require.False(t, seen[p.String()], "%s comes twice", p)
		seen[p.String()] = true
		require.Equal(t, p.Model, p.ModelOf(Small).Name)
		require.Equal(t, p.Model, p.ModelOf(Timed).Name)
		require.NotEmpty(t, p.Tier())
	}
	require.Len(t, seen, 2*4*2*3*2)
}

func TestModelsAreValid(t *testing.T) {
	for _, size := range [][]Model{Small, Timed} {
		for _, m := range size {
			folder, err := m.Write(t.TempDir())
			require.NoError(t, err)
			text, err := os.ReadFile(filepath.Join(folder, "config.json"))
			require.NoError(t, err)
			c, err := model.Parse(text)
			require.NoError(t, err, m.Name)
			require.LessOrEqual(t, m.Seq, c.Positions)
		}
	}
}
