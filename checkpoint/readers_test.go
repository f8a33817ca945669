package checkpoint

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// beside is a folder that calls the function happens once, after its names have been listed.
type beside struct {
	filesys.Folder
	happens *func()
}

func (b beside) Open(path string) (f filesys.Folder, err error) {
	b.Folder, err = filesys.Open(path)
	return b, err
}

func (b beside) Names() ([]string, error) {
	names, err := b.Folder.Names()
	if do := *b.happens; do != nil {
		*b.happens = nil
		do()
	}
	return names, err
}

// TestReadersTakeTheNextWhereARunRemovesTheirs replaces the only checkpoint while a reader opens
// it. The reader must return the new one.
func TestReadersTakeTheNextWhereARunRemovesTheirs(t *testing.T) {
	dir, older, newer := twoSteps(t)
	aside := filepath.Join(dir, ".aside")
	read := map[string]func(filesys.Opener) (string, error){
		"Take": func(o filesys.Opener) (string, error) {
			c, _, err := Take(background, o, dir)
			if err != nil {
				return "", err
			}
			return c.Name, c.Close()
		},
		"Each": func(o filesys.Opener) (names string, err error) {
			_, _, err = Each(o, dir, func(e Entry, c *Checkpoint) error {
				require.NoError(t, e.Err)
				names += e.Name
				return c.Verify(background)
			})
			return names, err
		},
	}
	for name, read := range read {
		require.NoError(t, os.Rename(newer, aside))
		happens := func() {
			require.NoError(t, os.Rename(aside, newer))
			require.NoError(t, os.Rename(older, aside))
		}
		got, err := read(beside{happens: &happens})
		require.NoError(t, err, name)
		require.Equal(t, filepath.Base(newer), got, name)
		require.NoError(t, os.Rename(aside, older))
	}
}

// TestAnOpenCheckpointOutlivesItsNames checks that an open checkpoint can be read after a run has
// removed it.
func TestAnOpenCheckpointOutlivesItsNames(t *testing.T) {
	dir, _, newer := twoSteps(t)
	c, passed, err := Take(background, filesys.System, dir, AsLoaded)
	require.NoError(t, err)
	require.Empty(t, passed)
	require.NoError(t, os.RemoveAll(newer))
	require.NoError(t, c.Verify(background))
	text, err := c.Read("config.json")
	require.NoError(t, err)
	require.NotEmpty(t, text)
	require.NoError(t, c.Close())
	_, err = OpenCheckpoint(newer)
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.NotErrorIs(t, err, ErrDamaged, "what was removed is not damaged")
}
