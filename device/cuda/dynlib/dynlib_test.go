package dynlib

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func file(t *testing.T, path string) string {
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(t, os.WriteFile(path, []byte("no library"), 0o644))
	return path
}

// The folders that the user names come first, then the loader's own search, then Python
// environments.
func TestCandidatesInOrder(t *testing.T) {
	dir := t.TempDir()
	given := file(t, filepath.Join(dir, "given", "libthing.so.2"))
	newer := file(t, filepath.Join(dir, "venv", "lib", "python3.12", "site-packages", "nvidia", "thing", "lib", "libthing.so.3"))
	older := file(t, filepath.Join(dir, "venv", "lib", "python3.12", "site-packages", "nvidia", "thing", "lib", "libthing.so.2"))
	t.Setenv(Env, filepath.Join(dir, "empty")+string(os.PathListSeparator)+filepath.Dir(given))
	t.Setenv("VIRTUAL_ENV", filepath.Join(dir, "venv"))
	require.Equal(t, []string{given, "libthing.so.3", "libthing.so.2", newer, older}, Candidates("libthing.so.3", "libthing.so.2"))
}

// A library in the working folder is never a candidate, even if PATH has relative entries.
func TestRelativePathEntriesAreNotLookedAt(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	file(t, filepath.Join(dir, "env", "bin", "python3"))
	library := filepath.Join("env", "lib", "python3.12", "site-packages", "nvidia", "thing", "lib", "libthing.so.2")
	file(t, filepath.Join(dir, library))
	t.Setenv("PATH", filepath.Join("env", "bin"))
	require.NotContains(t, Candidates("libthing.so.2"), library)
	t.Setenv("PATH", filepath.Join(dir, "env", "bin"))
	require.Contains(t, Candidates("libthing.so.2"), filepath.Join(dir, library))
}

func TestNotFoundSaysWhereItLooked(t *testing.T) {
	dir := t.TempDir()
	given := file(t, filepath.Join(dir, "libthing.so.2"))
	t.Setenv(Env, dir)
	_, err := Open("Thing", "libthing.so.2")
	var missing *NotFound
	require.ErrorAs(t, err, &missing)
	require.Equal(t, []string{given}, missing.Tried)
	for _, part := range []string{"Thing was not found", "libthing.so.2", "$" + Env, given + " did not open"} {
		require.ErrorContains(t, err, part)
	}
}

// Libraries of a newer major version than the driver's CUDA are not tried. If the driver's version
// is unknown, all are tried, and so are names without a version.
func TestLibrariesUpToTheDriver(t *testing.T) {
	names := []string{"libx.so.13", "libx.so.12", "libx.so.11.2", "libx.so"}
	require.Equal(t, names[1:], UpTo(12040, names...))
	require.Equal(t, names[2:], UpTo(11080, names...))
	require.Equal(t, names, UpTo(13000, names...))
	require.Equal(t, names, UpTo(0, names...))
}
