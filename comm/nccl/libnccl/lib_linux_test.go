//go:build amd64 || arm64

package libnccl

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/comm/nccl"
	"github.com/spillway-ml/spillway/device/cuda/dynlib"
)

// compiled builds and opens a library from testdata. It checks that its functions get the arguments
// that this test passes. Without a C compiler the test is skipped.
func compiled(t *testing.T, flags ...string) (*library, error) {
	t.Helper()
	cc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("there is no gcc to make a library of testdata/nccl.c with: ", err)
	}
	dir := t.TempDir()
	args := append([]string{"-shared", "-fPIC", "-O1", "-o", filepath.Join(dir, "libnccl.so.2"), "testdata/nccl.c"}, flags...)
	out, err := exec.Command(cc, args...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	t.Setenv(dynlib.Env, dir)
	return open()
}

// All arguments arrive as C expects them, including the 128 bytes of an id by value.
func TestArgumentsArrive(t *testing.T) {
	l, err := compiled(t)
	require.NoError(t, err)
	v, err := l.Version()
	require.NoError(t, err)
	require.Equal(t, "2.21.5", nccl.VersionText(v))
	id, err := l.UniqueID()
	require.NoError(t, err)
	c, to := new(nccl.Comm), new(nccl.Comm)
	require.NoError(t, l.Init(c, 5, id, 3, nccl.Config{Share: true}))
	require.Equal(t, nccl.Comm(0x1234567890), *c)
	require.NoError(t, l.Split(*c, to, 2, 9, nccl.Config{CTAs: 3}))
	require.Equal(t, nccl.Comm(0x77), *to)
	require.NoError(t, l.Shrinks())
	require.NoError(t, l.Shrink(*c, []int{1, 4}, to, nccl.Config{CTAs: 1}))
	require.Equal(t, nccl.Comm(0x88), *to)
	require.Error(t, l.Shrink(*c, nil, to, nccl.Config{}))
	busy, err := l.State(*c)
	require.NoError(t, err)
	require.True(t, busy)
	busy, err = l.State(*c)
	require.NoError(t, err)
	require.False(t, busy)
	_, err = l.State(*c)
	require.ErrorContains(t, err, "ncclCommGetAsyncError: other")
	const n = 1 << 33
	require.NoError(t, l.GroupStart())
	require.NoError(t, l.AllGather(0x1000, 0x2000, n, *c, 0x55))
	require.NoError(t, l.Broadcast(0x1000, n, 4, *c, 0x55))
	require.NoError(t, l.Send(0x1000, n, 1, *c, 0x55))
	require.NoError(t, l.Recv(0x1000, n, 2, *c, 0x55))
	require.NoError(t, l.GroupEnd())
	require.NoError(t, l.Finalize(*c))
	require.NoError(t, l.Destroy(*c))
	require.NoError(t, l.Abort(*c))

	id[77]++
	var wrong *nccl.Error
	require.ErrorAs(t, l.Init(c, 5, id, 3, nccl.Config{}), &wrong)
	require.Equal(t, "ncclCommInitRankConfig: invalid argument: id.internal[i] is "+"29"+" (4)", wrong.Error())
}

// A library without a required function is refused with an error that names its version.
func TestTooOld(t *testing.T) {
	_, err := compiled(t, "-DVERSION=21703")
	require.ErrorContains(t, err, "want NCCL 2.18.0 or later: ")
	require.ErrorContains(t, err, "is NCCL 2.17.3")
	_, err = compiled(t, "-DncclCommSplit=ncclCommDivide")
	require.ErrorContains(t, err, "want NCCL 2.18.0 or later: ")
	require.ErrorContains(t, err, "has no ncclCommSplit")
}

// A library that only lacks ncclCommShrink is accepted. Only shrinking fails.
func TestWithoutShrink(t *testing.T) {
	l, err := compiled(t, "-DncclCommShrink=ncclCommLessen")
	require.NoError(t, err)
	require.ErrorContains(t, l.Shrinks(), "is NCCL 2.21.5, which has no ncclCommShrink: want 2.27.0 or later")
	require.ErrorContains(t, l.Shrink(1, []int{1}, new(nccl.Comm), nccl.Config{}), "has no ncclCommShrink")
}

// If no library is found, the error lists the names that were looked for.
func TestMissing(t *testing.T) {
	if _, err := open(); err == nil {
		t.Skip("this machine has an NCCL")
	}
	_, err := open()
	require.ErrorContains(t, err, "NCCL was not found: looked for libnccl.so.2 in $"+dynlib.Env)
}
