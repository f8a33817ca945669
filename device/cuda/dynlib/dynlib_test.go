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

// What a person names comes first, then the loader's own, then environments.
func TestCandidatesInOrder(t *testing.T) {
	dir := t.TempDir()
	given := file(t, filepath.Join(dir, "given", "libthing.so.2"))
	newer := file(t, filepath.Join(dir, "venv", "lib", "python3.12", "site-packages", "nvidia", "thing", "lib", "libthing.so.3"))
	older := file(t, filepath.Join(dir, "venv", "lib", "python3.12", "site-packages", "nvidia", "thing", "lib", "libthing.so.2"))
	t.Setenv(Env, filepath.Join(dir, "empty")+string(os.PathListSeparator)+filepath.Dir(given))
	t.Setenv("VIRTUAL_ENV", filepath.Join(dir, "venv"))
	require.Equal(t, []string{given, "libthing.so.3", "libthing.so.2", newer, older}, Candidates("libthing.so.3", "libthing.so.2"))
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
