package jobs

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// A new job continues from the checkpoints that it saved, not from older ones.
func TestAJobGoesOnFromItsOwnCheckpoints(t *testing.T) {
	dir := t.TempDir()
	add := func(name string) { require.NoError(t, os.Mkdir(filepath.Join(dir, name), 0o700)) }
	require.Equal(t, []string{"train", "--resume"}, CheckpointsOf(dir, false).Resuming([]string{"train"}), "no other run's")
	add("step-00000400")
	anew, on := CheckpointsOf(dir, false), CheckpointsOf(dir, true)
	args := []string{"train", "--steps", "9"}
	require.Equal(t, args, anew.Resuming(args))
	require.Equal(t, []string{"train", "--steps", "9", "--resume"}, on.Resuming(args))
	where, step := anew.From()
	require.Equal(t, "step 1", where)
	require.Zero(t, step)
	where, step = on.From()
	require.Equal(t, "the checkpoint of step 400", where)
	require.Equal(t, 400, step)

	before := anew.Names()
	require.False(t, anew.Grew(before))
	add("step-00000007")
	require.True(t, anew.Grew(before))
	where, step = anew.From()
	require.Equal(t, "the checkpoint of step 7", where)
	require.Equal(t, 7, step)
	require.Equal(t, []string{"train", "--steps", "9", "--resume"}, anew.Resuming(args))
	require.Equal(t, []string{"train", "--resume"}, anew.Resuming([]string{"train", "--resume"}), "once")
	require.Len(t, args, 3)
}

// Another attempt starts only in the folder that the job began in.
func TestAnotherAttemptIsInTheSameFolder(t *testing.T) {
	dir := t.TempDir()
	link, a, b := filepath.Join(dir, "link"), filepath.Join(dir, "a"), filepath.Join(dir, "b")
	require.NoError(t, os.Mkdir(b, 0o700))
	require.NoError(t, os.Mkdir(a, 0o700))
	require.NoError(t, os.Symlink("a", link))
	o := CheckpointsOf(link, false)
	release, err := o.Hold()
	require.NoError(t, err)
	require.NoError(t, o.Moved())
	require.NoError(t, os.Remove(link))
	require.NoError(t, os.Symlink("b", link))
	require.ErrorContains(t, o.Moved(), "another folder than the one that the job began in")
	require.NoError(t, os.Remove(link))
	require.ErrorContains(t, o.Moved(), "is gone")
	release()

	o = CheckpointsOf(filepath.Join(dir, "made"), false)
	release, err = o.Hold()
	require.NoError(t, err)
	require.DirExists(t, o.Folder)
	release()
	require.NoDirExists(t, o.Folder, "nothing was written there")
}
