package doctor

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
	"github.com/spillway-ml/spillway/offload/store"
)

// quick is too short for meaningful measurements.
var quick = store.Effort{Bytes: 4 << 20, Each: time.Millisecond}

func TestDoctorMeasuresADiskOnce(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("the disk tier is Linux's")
	}
	ownworld.Config(t, t.TempDir())
	dir := filepath.Join(t.TempDir(), "disk")
	d, err := diagnose(context.Background(), dir, quick)
	require.NoError(t, err)
	require.NoDirExists(t, dir, "left as it was found")
	for _, s := range d.Disk.Samples {
		require.Positive(t, s.Read)
		require.Positive(t, s.Write)
	}
	got, err := store.LoadTuning(dir)
	require.NoError(t, err)
	require.Equal(t, d.Disk.Chosen, got, "what later runs start from")
	var out bytes.Buffer
	d.print(&out)
	require.Equal(t, 1, strings.Count(out.String(), "chosen"))
	require.Contains(t, out.String(), filepath.Join("spillway", "doctor.json"))
}

// A measurement that cannot be stored is printed all the same.
func TestDoctorWithoutAConfigurationFolder(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("the disk tier is Linux's")
	}
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	for _, home := range []string{"", file} {
		ownworld.Config(t, home)
		d, err := diagnose(context.Background(), t.TempDir(), quick)
		require.NoError(t, err)
		require.Positive(t, d.Disk.Chosen.Block)
		require.Empty(t, d.Disk.StoredIn)
		require.Len(t, d.Disk.Warnings, 1)
		require.Contains(t, d.Memory.Warning, "keep the measurement: ")
		require.Contains(t, d.Disk.Warnings[0], "store the measurement: ")
	}
}
