package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/launch"
)

// Where rank 0 is the lost one, nobody but the launcher can say at which step.
func TestTheStepOfALoss(t *testing.T) {
	var out bytes.Buffer
	tellEnd(&out, launch.End{Lost: "rank 0 (process 7): signal: killed", Failure: "rank 0 died in x", Flight: "rank 0: none\n", Steps: 12})
	require.Equal(t, "spillway: launch: rank 0 (process 7): signal: killed\nspillway: launch: the job ended after step 12 with: rank 0 died in x\nthe last operations of each rank:\nrank 0: none\n", out.String())
	out.Reset()
	tellEnd(&out, launch.End{Failure: "rank 0 died in x", Flight: "rank 0: none\n"})
	require.Contains(t, out.String(), "the job ended with: rank 0 died in x\n")
}

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

// Another attempt goes into the folder that the job began in, or none begins.
func TestAnotherAttemptIsInTheSameFolder(t *testing.T) {
	dir := t.TempDir()
	link, a, b := filepath.Join(dir, "link"), filepath.Join(dir, "a"), filepath.Join(dir, "b")
	require.NoError(t, os.Mkdir(b, 0o700))
	require.NoError(t, os.Mkdir(a, 0o700))
	require.NoError(t, os.Symlink("a", link))
	o := checkpointsOf(link, false)
	release, err := o.hold()
	require.NoError(t, err)
	require.NoError(t, o.moved())
	require.NoError(t, os.Remove(link))
	require.NoError(t, os.Symlink("b", link))
	require.ErrorContains(t, o.moved(), "another folder than the one that the job began in")
	require.NoError(t, os.Remove(link))
	require.ErrorContains(t, o.moved(), "is gone")
	release()

	o = checkpointsOf(filepath.Join(dir, "made"), false)
	release, err = o.hold()
	require.NoError(t, err)
	require.DirExists(t, o.folder)
	release()
	require.NoDirExists(t, o.folder, "nothing was written there")
}
