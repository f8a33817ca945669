package aside

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func names(t *testing.T, dir string) (list []string) {
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list
}

// Write replaces a file's contents completely. If writing fails, the old contents stay and no
// temporary file remains.
func TestWrite(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	longest := filepath.Join(dir, strings.Repeat("n", 255))
	require.NoError(t, WriteBytes(longest, nil, 0o666), "the longest name that filesystems take")
	require.NoError(t, os.Remove(longest))
	require.NoError(t, WriteBytes(path, []byte("one"), 0o666))
	during := ""
	err := Write(path, 0o666, func(w io.Writer) error {
		_, err := w.Write([]byte("half of two"))
		require.NoError(t, err)
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		during = string(text)
		return errors.New("the disk is full")
	})
	require.EqualError(t, err, "the disk is full")
	require.Equal(t, "one", during)
	require.Equal(t, []string{"f"}, names(t, dir))
	require.NoError(t, WriteBytes(path, []byte("two"), 0o666))
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "two", string(text))
	require.Equal(t, []string{"f"}, names(t, dir))
	st, err := os.Stat(path)
	require.NoError(t, err)
	plain := filepath.Join(dir, "plain")
	require.NoError(t, os.WriteFile(plain, nil, 0o666))
	other, err := os.Stat(plain)
	require.NoError(t, err)
	require.Equal(t, other.Mode(), st.Mode(), "the umask's rights, as of any new file")

	require.NoError(t, WriteBytes(path, nil, 0o600))
	st, err = os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), st.Mode())

	require.Error(t, WriteBytes(filepath.Join(dir, "not", "there"), nil, 0o666))
	folder := filepath.Join(dir, "folder", "full")
	require.NoError(t, os.MkdirAll(folder, 0o755))
	require.NoError(t, WriteBytes(path, nil, 0o600))
	st, err = os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), st.Mode())

	require.Error(t, WriteBytes(filepath.Dir(folder), []byte("x"), 0o666), "a folder is no file")
	require.Equal(t, []string{"f", "folder", "plain"}, names(t, dir))
}
