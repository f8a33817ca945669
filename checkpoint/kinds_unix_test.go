//go:build unix

package checkpoint

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestUmask(t *testing.T) {
	old := unix.Umask(0o077)
	defer unix.Umask(old)
	dir := filepath.Join(t.TempDir(), "ck")
	s := open(t, dir, Options{})
	folder := save(t, s, 1)
	require.NoError(t, s.Confirm())
	for _, path := range []string{dir, folder, filepath.Join(folder, modelFile), filepath.Join(folder, "config.json"), filepath.Join(folder, manifestName), filepath.Join(dir, marksName)} {
		st, err := os.Stat(path)
		require.NoError(t, err)
		require.Zero(t, st.Mode().Perm()&0o077, path)
	}
}

// TestOwnFilesOfAnotherKind puts a link, pipe or folder in place of each file of the store. Open
// must fail, and must not write through the link.
func TestOwnFilesOfAnotherKind(t *testing.T) {
	for _, name := range OwnFiles() {
		for what, put := range map[string]func(path string) error{
			"a link":   func(p string) error { return os.Symlink(filepath.Join(filepath.Dir(p), "victim"), p) },
			"a pipe":   func(p string) error { return unix.Mkfifo(p, 0o644) },
			"a folder": func(p string) error { return os.Mkdir(p, 0o755) },
		} {
			dir := t.TempDir()
			require.NoError(t, os.WriteFile(filepath.Join(dir, "victim"), nil, 0o644))
			require.NoError(t, put(filepath.Join(dir, name)))
			_, err := Open(dir, Options{})
			require.ErrorContains(t, err, name, what)
			text, err := os.ReadFile(filepath.Join(dir, "victim"))
			require.NoError(t, err)
			require.Empty(t, text)
			entries, err := os.ReadDir(dir)
			require.NoError(t, err)
			require.Len(t, entries, 2, "%s under %s", what, name)
		}
	}
}

// TestAnyFileDamaged damages each file of the newer checkpoint: cut, extended, removed, renamed,
// swapped with the other step's, or replaced by another kind of file. Each must be found.
func TestAnyFileDamaged(t *testing.T) {
	for what, damage := range map[string]func(path, other string) error{
		"cut by a byte": func(p, _ string) error { return cut(p, 1) },
		"cut by half":   func(p, _ string) error { st, err := os.Stat(p); require.NoError(t, err); return cut(p, st.Size()/2) },
		"empty":         func(p, _ string) error { return os.Truncate(p, 0) },
		"longer": func(p, _ string) error {
			text, err := os.ReadFile(p)
			require.NoError(t, err)
			return os.WriteFile(p, append(text, '\n'), 0o644)
		},
		"removed":     func(p, _ string) error { return os.Remove(p) },
		"renamed":     func(p, _ string) error { return os.Rename(p, p+".old") },
		"a pipe":      func(p, _ string) error { require.NoError(t, os.Remove(p)); return unix.Mkfifo(p, 0o644) },
		"a device":    func(p, _ string) error { require.NoError(t, os.Remove(p)); return os.Symlink("/dev/zero", p) },
		"a folder":    func(p, _ string) error { require.NoError(t, os.Remove(p)); return os.Mkdir(p, 0o755) },
		"a dead link": func(p, _ string) error { require.NoError(t, os.Remove(p)); return os.Symlink("nowhere", p) },
		"swapped": func(p, other string) error {
			text, err := os.ReadFile(other)
			require.NoError(t, err)
			return os.WriteFile(p, text, 0o644)
		},
	} {
		t.Run(what, func(t *testing.T) {
			for _, name := range fileNames {
				if what == "swapped" && name == "config.json" {
					continue // same bytes in both checkpoints
				}
				dir, older, newer := twoSteps(t)
				require.NoError(t, damage(filepath.Join(newer, name), filepath.Join(older, name)))
				if what == "renamed" && name != manifestName || what == "swapped" && name == manifestName {
					chosen(t, dir, "") // the error names the folder or either file
					continue
				}
				chosen(t, dir, name)
			}
		})
	}
}
