package exec_test

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cpu"
	"github.com/spillway-ml/spillway/exec"
	"github.com/spillway-ml/spillway/graph"
	"github.com/spillway-ml/spillway/internal/testkit/fault"
	"github.com/spillway-ml/spillway/internal/testkit/layouts"
	"github.com/spillway-ml/spillway/memplan"
	"github.com/spillway-ml/spillway/offload/store"
)

// The host can write and read any byte range of a buffer on disk, through host staging. The
// program's copies move disk buffers too.
func TestDiskBuffers(t *testing.T) {
	for _, wrapped := range []bool{false, true} {
		p := &graph.Program{}
		buffer := func(name string, space graph.Space, n int64, class graph.Class) graph.BufID {
			return p.AddBuffer(graph.Buffer{Name: name, DType: graph.U8, Shape: []int64{n}, Space: space, Class: class, Life: graph.LifeRun, Unit: -1})
		}
		const size = 50_001
		a, b := buffer("a", graph.Disk, size, graph.Optimizer), buffer("b", graph.Disk, size, graph.Optimizer)
		host := buffer("host", graph.Host, size, graph.Optimizer)
		p.Buf(buffer("staging", graph.Host, 7000, graph.Communication)).Port = graph.PortStaging
		p.Events = 1
		p.Sections = []graph.Section{{Name: "step", Phases: []graph.Phase{{Name: "update", Repeat: 1, Ops: []graph.Op{
			{Kind: graph.Copy, Name: "fetch", Stream: graph.CopyIn, In: []graph.BufID{a}, Out: []graph.Out{{Buf: host}}, Work: graph.NoBuf, Skip: graph.NoBuf, Unit: -1, Record: 1},
			{Kind: graph.Copy, Name: "park", Stream: graph.CopyOut, In: []graph.BufID{host}, Out: []graph.Out{{Buf: b}}, Work: graph.NoBuf, Skip: graph.NoBuf, Unit: -1, Wait: []graph.EventID{1}},
		}}}}}
		layout, err := layouts.Assign(p, memplan.Options{Align: 64})
		require.NoError(t, err)
		folder, err := store.Open(t.TempDir(), store.Options{Block: 16 << 10, Depth: 3})
		require.NoError(t, err)
		var ctx device.Context = cpu.New(0, cpu.Options{Disk: folder.Create, Poison: true})
		if wrapped {
			ctx = fault.Wrap(ctx, fault.Plan{})
		}
		e, err := exec.New(exec.Config{Program: p, Layout: layout, Context: ctx, Library: library{}})
		require.NoError(t, err)

		data := make([]byte, size)
		r := rand.New(rand.NewPCG(1, 1))
		for i := range data {
			data[i] = byte(r.Uint32())
		}
		got := make([]byte, size)
		require.NoError(t, e.Read(a, 0, got))
		require.Equal(t, bytes.Repeat([]byte{0xFF}, size), got, "never written, so poison")
		require.NoError(t, e.Write(a, 0, data))
		for _, w := range []struct{ off, n int64 }{{4095, 2}, {0, 1}, {size - 3, 3}, {5000, 9001}} {
			copy(data[w.off:], bytes.Repeat([]byte{byte(w.n)}, int(w.n)))
			require.NoError(t, e.Write(a, w.off, data[w.off:w.off+w.n]))
			require.NoError(t, e.Read(a, w.off, got[:w.n]))
			require.Equal(t, data[w.off:w.off+w.n], got[:w.n])
		}
		before := e.DiskTraffic()
		require.NoError(t, e.RunSection("step", nil))
		after := e.DiskTraffic()
		require.Equal(t, device.Traffic{Read: size, Written: size}, device.Traffic{Read: after.Read - before.Read, Written: after.Written - before.Written})
		require.NoError(t, e.Read(b, 0, got))
		require.Equal(t, data, got)
		require.Equal(t, layout.Spaces[graph.Disk].Peak, e.Touched(graph.Disk), "promise 2")
		require.NoError(t, e.Close())
		require.NoError(t, folder.Close())
	}
}
