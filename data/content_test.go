//go:build unix

package data

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestContent checks that Content depends on the bytes, kinds and order of the files, but not on
// their names.
func TestContent(t *testing.T) {
	folder := func(files ...string) string {
		dir := t.TempDir()
		for i := 0; i < len(files); i += 2 {
			require.NoError(t, os.WriteFile(filepath.Join(dir, files[i]), []byte(files[i+1]), 0o644))
		}
		return dir
	}
	of := func(path string) string {
		c, err := Content(path, Options{TextField: "text"})
		require.NoError(t, err)
		return c
	}
	base := of(folder("a.txt", "one", "b.txt", "two"))
	require.Equal(t, base, of(folder("x.txt", "one", "y.txt", "two")))
	for _, other := range []string{folder("a.txt", "two", "b.txt", "one"), folder("a.txt", "onet", "b.txt", "wo"), folder("a.txt", "one", "b.txt", "twp"),
		folder("a.jsonl", "one", "b.txt", "two"), folder("a.txt", "onetwo")} {
		require.NotEqual(t, base, of(other))
	}
	require.Empty(t, of(filepath.Join(t.TempDir(), "nowhere")))
	pipe := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	require.Empty(t, of(pipe), "a pipe is read once, by who trains")
}
