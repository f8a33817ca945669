package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// A job that begins anew goes on from what it has saved itself, not from what was there.
func TestAJobGoesOnFromItsOwnCheckpoints(t *testing.T) {
	dir := t.TempDir()
	add := func(name string) { require.NoError(t, os.Mkdir(filepath.Join(dir, name), 0o700)) }
	add("step-00000400")
	anew, on := checkpointsOf(dir, false), checkpointsOf(dir, true)
	args := []string{"train", "--steps", "9"}
	require.Equal(t, args, anew.resuming(args))
	require.Equal(t, []string{"train", "--steps", "9", "--resume"}, on.resuming(args))
	where, step := anew.from()
	require.Equal(t, "step 1", where)
	require.Zero(t, step)
	where, step = on.from()
	require.Equal(t, "the checkpoint of step 400", where)
	require.Equal(t, 400, step)

	before := anew.names()
	require.False(t, anew.grew(before))
	add("step-00000007")
	require.True(t, anew.grew(before))
	where, step = anew.from()
	require.Equal(t, "the checkpoint of step 7", where)
	require.Equal(t, 7, step)
	require.Equal(t, []string{"train", "--steps", "9", "--resume"}, anew.resuming(args))
	require.Equal(t, []string{"train", "--resume"}, anew.resuming([]string{"train", "--resume"}), "once")
	require.Len(t, args, 3)
}
