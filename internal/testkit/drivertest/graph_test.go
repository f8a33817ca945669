//go:build linux

package drivertest

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

// What a capture forbids fails, breaks it and leaves the stream as it was; a graph that is
// ready has memory of the device until it is destroyed.
func TestCaptureRules(t *testing.T) {
	d := Start(t, Options{GraphBytes: func(operations int) int64 { return int64(operations) << 10 }})
	s, err := d.NewStream()
	require.NoError(t, err)
	e, err := d.NewEvent(false)
	require.NoError(t, err)
	a, err := d.Alloc(4096)
	require.NoError(t, err)
	for name, call := range map[string]func() error{
		"allocates":   func() error { _, err := d.Alloc(1); return err },
		"synchronize": func() error { return d.Synchronize(s) },
		"query":       func() error { _, err := d.Done(e); return err },
		"record":      func() error { return d.Record(e, s) },
		"value":       func() error { return d.WriteValue(s, a, 1) },
	} {
		require.NoError(t, d.BeginCapture(s), name)
		require.NoError(t, d.Fill8(a, 1, 8, s), name)
		require.Equal(t, 900, code(t, call()), name)
		require.Equal(t, 901, code(t, d.Fill8(a, 1, 8, s)), name)
		_, err := d.EndCapture(s)
		require.Equal(t, 901, code(t, err), name)
		require.NoError(t, d.Synchronize(s), name)
	}
	_, err = d.EndCapture(s)
	require.Equal(t, 401, code(t, err))

	require.NoError(t, d.BeginCapture(s))
	require.Equal(t, 401, code(t, d.BeginCapture(s)))
	ran := 0
	require.NoError(t, d.Fill8(a, 7, 8, s))
	require.NoError(t, d.Run(s, "counts", func() error { ran++; return nil }))
	g, err := d.EndCapture(s)
	require.NoError(t, err)
	free, _, err := d.MemInfo()
	require.NoError(t, err)
	x, err := d.Instantiate(g)
	require.NoError(t, err)
	less, _, err := d.MemInfo()
	require.NoError(t, err)
	require.EqualValues(t, 2<<10, free-less)
	require.NoError(t, d.DestroyGraph(g))
	require.NoError(t, d.Synchronize(s))
	require.Zero(t, ran, "a capture runs nothing")
	for range 3 {
		require.NoError(t, d.LaunchGraph(x, s))
	}
	require.NoError(t, d.Synchronize(s))
	require.Equal(t, 3, ran)
	mem, err := d.Bytes(a, 8)
	require.NoError(t, err)
	require.EqualValues(t, 7, mem[7])
	require.NoError(t, d.DestroyGraphExec(x))
	again, _, err := d.MemInfo()
	require.NoError(t, err)
	require.Equal(t, free, again)
	require.NoError(t, errors.Join(d.DestroyStream(s), d.DestroyEvent(e), d.Free(a)))
}
