package planner_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/planner"
)

func TestReadConfigNamesTheFile(t *testing.T) {
	dir := t.TempDir()
	_, err := planner.ReadConfig(dir)
	require.ErrorContains(t, err, filepath.Join(dir, "config.json"))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), []byte(`{"model_type":"gpt2"}`), 0o644))
	_, err = planner.ReadConfig(dir)
	require.ErrorContains(t, err, filepath.Join(dir, "config.json"))
	require.ErrorContains(t, err, "n_layer")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), make([]byte, 1<<20+1), 0o644))
	_, err = planner.ReadConfig(dir)
	require.ErrorContains(t, err, "over")
	_, err = planner.ReadConfig("/dev/null")
	require.ErrorContains(t, err, "regular")
}

// Shell escapes control characters, which a terminal would obey, in a form that a shell reads back.
func TestShell(t *testing.T) {
	require.Equal(t, "a '' 'it'\\''s' 'b\tc' "+`$'\x1b\'\"\xff'`, planner.Shell([]string{"a", "", "it's", "b\tc", "\x1b'\"\xff"}))
}
