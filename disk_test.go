package spillway

import (
	"context"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

// A folder that no buffer lies in is left as it was found, and refused as soon
// as it can't be one.
func TestUnusedDiskFolder(t *testing.T) {
	root := t.TempDir()
	c := tiny("gpt2")
	c.Steps = 1
	c.Disk = filepath.Join(root, "a", "b")
	runOf(t, c)
	require.NoDirExists(t, filepath.Join(root, "a"))

	c.Disk = filepath.Join(root, "mine")
	require.NoError(t, os.Mkdir(c.Disk, 0o700))
	runOf(t, c)
	entries, err := os.ReadDir(c.Disk)
	require.NoError(t, err, "the folder stays")
	require.Empty(t, entries)

	c.Disk = filepath.Join(root, "file")
	require.NoError(t, os.WriteFile(c.Disk, nil, 0o600))
	_, err = New(context.Background(), c)
	require.ErrorContains(t, err, "--disk "+c.Disk+": disk tier: "+c.Disk+" is not a folder")
}

func TestDiskCacheHasToFitTheHost(t *testing.T) {
	c := tiny("gpt2")
	c.Steps, c.Disk, c.HostMemory, c.DiskCache = 1, t.TempDir(), 8<<20, 9<<20
	_, err := New(context.Background(), c)
	require.ErrorContains(t, err, "--disk-cache 9437184: of --host-memory 8388608 the plan leaves ")
}

func TestProcessorsForTheDisk(t *testing.T) {
	before := runtime.GOMAXPROCS(0)
	var e extraProcs
	e.acquire()
	e.acquire()
	require.Equal(t, before+procsForDisk, runtime.GOMAXPROCS(0))
	require.Equal(t, before, e.procs(), "kernels get what they had")
	e.release()
	require.Equal(t, before+procsForDisk, runtime.GOMAXPROCS(0))
	e.release()
	require.Equal(t, before, runtime.GOMAXPROCS(0))
	require.Equal(t, before, e.procs())
}
