package filesys

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAbove(t *testing.T) {
	for path, want := range map[string][2]string{
		"ck": {".", "ck"}, "a/ck": {"a/", "ck"}, "a/ck//": {"a/", "ck"}, "/ck": {"/", "ck"}, "a/ck/./": {"a/", "ck"}, "./ck": {"./", "ck"},
		"l/../ck": {"l/../", "ck"}, ".ck": {".", ".ck"}, "a/..": {"a/", ""}, "..": {".", ""}, ".": {".", ""}, "/": {".", ""}, "": {".", ""},
	} {
		folder, name := Above(path)
		require.Equal(t, want, [2]string{folder, name}, path)
	}
}

// MakeFolder creates a missing folder at the place to which its path leads, even if ".." follows a
// symlink.
func TestMakeFolderBehindALink(t *testing.T) {
	top := t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(top, "a", "b"), 0o700))
	require.NoError(t, os.Symlink("a/b", filepath.Join(top, "l")))
	f, made, err := MakeFolder(System, top+"/l/../new/ck")
	require.NoError(t, err)
	made.Stay()
	require.NoError(t, f.Close())
	require.DirExists(t, filepath.Join(top, "a", "new", "ck"))
	require.NoDirExists(t, filepath.Join(top, "new"))
	_, known := RoomAt(System, top+"/l/../no/where")
	require.True(t, known)
	_, _, err = MakeFolder(System, top+"/missing/..")
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NoError(t, os.Symlink("gone", filepath.Join(top, "dead")))
	for _, path := range []string{"/dead", "/dead/ck"} {
		_, _, err = MakeFolder(System, top+path)
		require.EqualError(t, err, "open "+top+"/dead: it is a link to a folder that does not exist; make that folder, or remove the link")
		require.ErrorIs(t, err, ErrLeads)
	}
}
