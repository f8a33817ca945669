//go:build unix

package owned

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMakeIsForTheUserAlone(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	require.NoError(t, Folder(dir), "not there")
	require.NoError(t, Make(dir))
	st, err := os.Stat(dir)
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o700), st.Mode().Perm())
	for mode, own := range map[fs.FileMode]bool{0o700: true, 0o755: true, 0o720: false, 0o702: false, 0o777: false} {
		require.NoError(t, os.Chmod(dir, mode))
		for _, err := range []error{Make(dir), Folder(dir)} {
			if own {
				require.NoError(t, err)
				continue
			}
			var e *Error
			require.ErrorAs(t, err, &e, "%o", mode)
			require.ErrorContains(t, err, "may be written by others")
		}
	}
}

func TestAnotherUsersFolder(t *testing.T) {
	dir := "/" // of the superuser
	if os.Geteuid() == 0 {
		dir = t.TempDir()
		require.NoError(t, os.Chmod(dir, 0o700))
		if err := os.Chown(dir, 12345, -1); err != nil {
			t.Skip(err)
		}
	}
	require.ErrorContains(t, Make(dir), "belongs to user")
}
