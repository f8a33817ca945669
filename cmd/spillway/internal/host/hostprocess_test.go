package host

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
)

const testdata = "../../../../testdata"

func TestProcessorsForTheDisk(t *testing.T) {
	before := runtime.GOMAXPROCS(0)
	var e extraProcs
	e.BesideDisk()
	release := e.BesideDisk()
	require.Equal(t, before+procsForDisk, runtime.GOMAXPROCS(0))
	e.release()
	require.Equal(t, before+procsForDisk, runtime.GOMAXPROCS(0))
	release()
	require.Equal(t, before, runtime.GOMAXPROCS(0))
}

// A run with the disk tier has more processors than compute threads while it is open; other runs do
// not.
func TestARunHasProcessorsForItsDisk(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("the disk tier is Linux's")
	}
	before := runtime.GOMAXPROCS(0)
	c := spillway.Default()
	c.Model, c.Init, c.Data, c.Batch, c.Seq = testdata+"/gpt2", testdata+"/gpt2", testdata+"/text.bin", 1, 16
	for offload, extra := range map[string]int{"": 0, "optimizer=disk": procsForDisk} {
		c.Offload, c.Disk = offload, t.TempDir()
		tr, closeAll, err := NewTrainer(t.Context(), c, spillway.New)
		require.NoError(t, err)
		require.Equal(t, before+extra, runtime.GOMAXPROCS(0), offload)
		require.Equal(t, before, tr.Config().Threads, "kernels get what they had")
		require.NoError(t, closeAll())
		require.Equal(t, before, runtime.GOMAXPROCS(0), offload)
	}
	c.DeviceMemory = 1
	_, _, err := NewTrainer(t.Context(), c, spillway.New)
	require.Error(t, err)
	require.Equal(t, before, runtime.GOMAXPROCS(0))
}
