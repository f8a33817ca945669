package train

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/plan"
)

// roomy is a folder of the system, and its opener, with the given free space.
type roomy struct {
	filesys.Folder
	room *filesys.Room
}

func (r roomy) Room() (filesys.Room, error) { return *r.room, nil }

func (r roomy) Open(path string) (f filesys.Folder, err error) {
	r.Folder, err = filesys.Open(path)
	return r, err
}

func (r roomy) Sub(name string) (f filesys.Folder, err error) {
	r.Folder, err = r.Folder.Sub(name)
	return r, err
}

// TestRoomForCheckpoints checks that a run without room for one checkpoint is refused before its
// ranks open, with the needed and free bytes. A run with room for only some checkpoints is warned.
// Checkpoints that Keep removes count as free.
func TestRoomForCheckpoints(t *testing.T) {
	c := keeping(t, 4)
	dir := filepath.Join(c.Checkpoint, "ck")
	c.Checkpoint = dir
	disk := roomy{room: &filesys.Room{Free: 1 << 40, Most: 1 << 40}}
	c.folders = disk
	begin := func(steps, every, keep int, resume bool, free int64) (warned []string, err error) {
		c := c
		*disk.room = filesys.Room{Free: free, Most: free}
		c.Steps, c.SaveEvery, c.Keep, c.Resume = steps, every, keep, resume
		c.Warn = func(text string) { warned = append(warned, text) }
		tr, err := c.start(context.Background())
		if err != nil {
			return warned, err
		}
		return warned, tr.Close()
	}
	_, err := begin(4, 1, 0, false, 1)
	require.ErrorIs(t, err, ErrDoesNotFit)
	require.NoDirExists(t, dir, "nothing is left of a run that is refused")
	elsewhere := c
	*disk.room = filesys.Room{Free: 1 << 40, Most: 1 << 40}
	elsewhere.Checkpoint = scratch(t)
	tr, err := elsewhere.start(context.Background())
	require.NoError(t, err)
	each, err := tr.CheckpointBytes()
	require.NoError(t, errors.Join(err, tr.Close()))

	_, err = begin(4, 0, 0, false, each-1)
	require.EqualError(t, err, "does not fit: a checkpoint takes "+plan.Bytes(each)+", and the file system of Config.Checkpoint "+dir+" has "+plan.Bytes(each-1)+" free; free 1 B there, or give a folder of another one")
	warned, err := begin(4, 0, 0, false, each)
	require.NoError(t, err)
	require.Empty(t, warned)
	warned, err = begin(4, 1, 0, false, 4*each-1)
	require.NoError(t, err)
	require.Equal(t, []string{"of 4 checkpoints, " + plan.Bytes(each) + " each, up to " + plan.Bytes(4*each) + " will lie in Config.Checkpoint " + dir + " at once, whose file system has " + plan.Bytes(4*each-1) + " free: some will not be saved; Config.Keep 2 fits"}, warned)
	for _, enough := range []struct{ every, keep int }{{2, 0}, {3, 0}, {1, 2}, {1, 1}} {
		warned, err = begin(4, enough.every, enough.keep, false, 4*each-1)
		require.NoError(t, err)
		require.Empty(t, warned, "%+v", enough)
	}

	disk.room.Most = 1 << 40
	c.SaveEvery = 1
	ended(t, c)
	list, err := checkpoint.List(dir)
	require.NoError(t, err)
	require.Len(t, list, 4)
	for _, folder := range list {
		var size int64
		files, err := os.ReadDir(folder)
		require.NoError(t, err)
		for _, f := range files {
			st, err := os.Stat(filepath.Join(folder, f.Name()))
			require.NoError(t, err)
			size += st.Size()
		}
		require.InDelta(t, each, size, 100, "but for the numbers in its manifest")
	}
	_, err = begin(5, 0, 0, true, each-1)
	require.ErrorIs(t, err, ErrDoesNotFit)
	warned, err = begin(5, 0, 2, true, 1)
	require.NoError(t, err, "Keep 2 removes two before the fifth is written")
	require.Empty(t, warned)
	_, err = begin(4, 0, 0, true, 0)
	require.NoError(t, err, "nothing is left to do, or to save")
}
