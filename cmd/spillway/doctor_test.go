package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/calibration"
	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
	"github.com/spillway-ml/spillway/offload/store"
)

func TestDoctorTellsTheMachine(t *testing.T) {
	var out, errs bytes.Buffer
	require.Zero(t, run(context.Background(), []string{"doctor"}, &out, &errs), errs.String())
	for _, line := range []string{"cpu ", "memory ", "locking ", "gpu ", "library ", "disk       not measured (give --disk DIR)"} {
		require.Contains(t, "\n"+out.String(), "\n"+line)
	}
	out.Reset()
	require.Zero(t, run(context.Background(), []string{"doctor", "--json", "-"}, &out, &errs), errs.String())
	var d diagnosis
	require.NoError(t, json.Unmarshal(out.Bytes(), &d))
	require.Equal(t, runtime.GOMAXPROCS(0), d.CPU.Cores)
	require.Positive(t, d.Memory.Copy)
	require.Equal(t, d.Memory.Copy, calibration.MemoryBandwidth(), "kept for plan --gpu detect")
	require.NotEmpty(t, d.Memory.StoredIn)
	require.Len(t, d.Libraries, len(libraries))
	require.Nil(t, d.Disk)
	require.True(t, (len(d.GPU.GPUs) == 0) == (d.GPU.Note != ""), "GPUs, or why there are none")
	if runtime.GOOS == "linux" {
		require.Greater(t, d.Memory.Total, d.Memory.Available)
		require.Positive(t, d.Memory.Available)
	}
}

// quick measures nothing that one should believe.
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

// A measurement that can't be kept is told all the same.
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

func TestDoctorRefusesBadFolders(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	var out, errs bytes.Buffer
	require.Equal(t, exitBadInput, run(context.Background(), []string{"doctor", "--disk", file}, &out, &errs))
	require.Equal(t, "spillway: --disk "+file+": disk tier: "+file+" is not a folder\n", errs.String())
	require.Equal(t, exitBadInput, run(context.Background(), []string{"doctor", "now"}, &out, &errs))
}
