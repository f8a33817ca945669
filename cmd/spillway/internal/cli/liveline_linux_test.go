package cli

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFitFields(t *testing.T) {
	fields := []string{"step 1/2", "", "loss 3", "device"}
	require.Equal(t, "step 1/2  loss 3  device", fitFields(fields, 24))
	require.Equal(t, "step 1/2  loss 3", fitFields(fields, 23))
	require.Equal(t, "step 1/2", fitFields(fields, 15))
	require.Equal(t, "step", fitFields(fields, 4))
	require.Equal(t, "", fitFields(fields, -1))
}

// A message that ends a process during a live line begins on a new line.
func TestTheEndLeavesTheLiveLine(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "screen"))
	require.NoError(t, err)
	defer f.Close()
	errs := &Outlet{File: f}
	line := &LiveLine{w: errs, file: f}
	errs.LeaveLine()
	line.Show([]string{"searching"}, true)
	errs.LeaveLine()
	errs.LeaveLine()
	line.Show([]string{"again"}, true)
	line.clear()
	errs.LeaveLine()
	text, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	require.Equal(t, "\rsearching\x1b[K\n\ragain\x1b[K\r\x1b[K", string(text))
}
