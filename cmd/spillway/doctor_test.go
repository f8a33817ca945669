package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/calibration"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/doctor"
	"github.com/spillway-ml/spillway/cmd/spillway/internal/root"
)

func TestDoctorTellsTheMachine(t *testing.T) {
	var out, errs bytes.Buffer
	require.Zero(t, root.Run(context.Background(), []string{"doctor"}, &out, &errs), errs.String())
	for _, line := range []string{"cpu ", "memory ", "locking ", "gpu ", "library ", "disk       not measured (give --disk DIR)"} {
		require.Contains(t, "\n"+out.String(), "\n"+line)
	}
	out.Reset()
	require.Zero(t, root.Run(context.Background(), []string{"doctor", "--json", "-"}, &out, &errs), errs.String())
	var d doctor.Diagnosis
	require.NoError(t, json.Unmarshal(out.Bytes(), &d))
	require.Equal(t, runtime.GOMAXPROCS(0), d.CPU.Cores)
	require.Positive(t, d.Memory.Copy)
	peak, ok := calibration.KeptPeak(d.CPU.Cores)
	require.True(t, ok, "kept for metrics")
	require.Equal(t, peak.PerS, d.CPU.Peak)
	require.Equal(t, d.Memory.Copy, calibration.MemoryBandwidth(), "kept for plan --gpu detect")
	require.NotEmpty(t, d.Memory.StoredIn)
	require.Len(t, d.Libraries, len(doctor.Libraries))
	require.Nil(t, d.Disk)
	require.True(t, (len(d.GPU.GPUs) == 0) == (d.GPU.Note != ""), "GPUs, or why there are none")
	if runtime.GOOS == "linux" {
		require.Greater(t, d.Memory.Total, d.Memory.Available)
		require.Positive(t, d.Memory.Available)
	}
}

func TestDoctorRefusesBadFolders(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	var out, errs bytes.Buffer
	require.Equal(t, cli.ExitBadInput, root.Run(context.Background(), []string{"doctor", "--disk", file}, &out, &errs))
	require.Equal(t, "spillway: --disk "+file+": disk tier: "+file+" is not a folder\n", errs.String())
	require.Equal(t, cli.ExitBadInput, root.Run(context.Background(), []string{"doctor", "now"}, &out, &errs))
}
