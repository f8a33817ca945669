package planning

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/calibration"
	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
	"github.com/spillway-ml/spillway/memplan/cost"
	"github.com/spillway-ml/spillway/offload/store"
)

// hostOnly is a machine with a measured memory bandwidth only.
type hostOnly struct{ Here }

func (hostOnly) MemoryBandwidth() float64 { return calibration.MemoryBandwidth() }

// A plan of this machine's GPUs uses the host speeds that doctor measured, divided by the ranks of
// the node.
func TestDetectTakesMeasuredHost(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("the disk tier is Linux's")
	}
	ownworld.Config(t, t.TempDir())
	disk := t.TempDir()
	m := cost.Machine{HostMemory: 1, DiskRead: 2, DiskWrite: 3}
	f := Flags{here: hostOnly{}}
	f.readMeasurements(disk)
	f.measured(&m, 4)
	require.Equal(t, cost.Machine{HostMemory: 1, DiskRead: 2, DiskWrite: 3}, m, "nothing was measured")
	_, err := calibration.KeepMemoryBandwidth(80e9)
	require.NoError(t, err)
	_, err = store.SaveTuning(disk, store.Tuning{Block: 1 << 20, Depth: 8, ReadBytesPerSec: 4e9, WriteBytesPerSec: 2e9})
	require.NoError(t, err)
	f.readMeasurements(disk)
	f.measured(&m, 4)
	require.Equal(t, cost.Machine{HostMemory: 20e9, DiskRead: 1e9, DiskWrite: 0.5e9}, m)
}
