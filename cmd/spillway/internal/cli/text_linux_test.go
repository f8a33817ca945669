package cli

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The check of an output changes and creates no files, and does not wait for a pipe's reader.
func TestCheckOutput(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	require.NoError(t, os.WriteFile(at("old"), []byte("kept"), 0o600))
	require.NoError(t, syscall.Mkfifo(at("pipe"), 0o600))
	for _, path := range []string{"", "-", at("old"), at("new"), at("folder/new"), os.DevNull} {
		require.NoError(t, CheckOutput("json", path), path)
	}
	checked := make(chan error, 1)
	go func() { checked <- CheckOutput("json", at("pipe")) }()
	select {
	case err := <-checked:
		require.NoError(t, err)
	case <-time.After(10 * time.Second):
		t.Fatal("the check waits for the pipe's reader")
	}
	for path, keeps := range map[string]bool{"": false, "-": false, at("pipe"): false, os.DevNull: false, at("old"): true, at("new"): true} {
		require.Equal(t, keeps, Keeps(path), path)
	}
	text, err := os.ReadFile(at("old"))
	require.NoError(t, err)
	require.Equal(t, "kept", string(text))
	require.NoFileExists(t, at("new"))
	require.ErrorContains(t, CheckOutput("json", dir), "--json: open ")
	require.ErrorContains(t, CheckOutput("html", at("old/page.html")), "--html: ")
}
