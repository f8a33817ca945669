package checkpoint

import (
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// TestAJoinedFolderIsRemoved removes the folder of a job. The store must create it again and the
// other processes must write to the new folder. They must not write to another folder at the same
// path.
func TestAJoinedFolderIsRemoved(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ck")
	s := open(t, dir, Options{})
	_, err := Join(filesys.System, dir, "another token")
	require.ErrorContains(t, err, "is not the folder that the run has open")
	j, err := Join(filesys.System, dir, s.Token())
	require.NoError(t, err)
	defer func() { require.NoError(t, j.Close()) }()

	writes := func(step int) {
		t.Helper()
		p, err := s.Begin(Manifest{Step: step})
		require.NoError(t, err)
		want, err := p.Folder().Info()
		require.NoError(t, err)
		var done sync.WaitGroup
		for range 4 { // four ranks of a process
			done.Go(func() {
				f, err := j.Writing(p.Name())
				if err != nil {
					t.Error(err)
					return
				}
				got, err := f.Info()
				if err != nil || !filesys.Same(want, got) || f.Close() != nil {
					t.Error("another folder", err)
				}
			})
		}
		done.Wait()
		require.Error(t, p.Abort(nil))
	}
	writes(1)
	require.NoError(t, os.RemoveAll(dir))
	_, err = j.Writing("a")
	require.ErrorIs(t, err, os.ErrNotExist)
	writes(2)

	require.NoError(t, os.RemoveAll(dir))
	other := open(t, dir, Options{})
	require.NoError(t, os.Mkdir(filepath.Join(dir, "a"), 0o755))
	_, err = j.Writing("a")
	require.ErrorContains(t, err, "is not the folder that the run has open")
	require.NoError(t, os.Remove(filepath.Join(dir, "a")))
	require.NoError(t, other.Close())
	require.NoError(t, os.RemoveAll(dir))
	writes(3)
}
