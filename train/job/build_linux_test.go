package job

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestLinkerIDIsTheBuildID checks the build ID that identifies builds without a commit: other
// sources give another ID. A file without an ID gives none.
func TestLinkerIDIsTheBuildID(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module m\n"), 0o644))
	build := func(text string, flags ...string) string {
		source := filepath.Join(dir, "main.go")
		require.NoError(t, os.WriteFile(source, []byte("package main\n\nfunc main() { println("+text+") }\n"), 0o644))
		path := filepath.Join(t.TempDir(), "program")
		c := exec.Command("go", append(append([]string{"build"}, flags...), "-o", path, ".")...)
		c.Dir = dir
		out, err := c.CombinedOutput()
		require.NoError(t, err, string(out))
		return path
	}
	one := build("1")
	id, err := exec.Command("go", "tool", "buildid", one).Output()
	require.NoError(t, err)
	require.Contains(t, string(linkerID(one)), string(bytes.TrimSpace(id)))
	require.Equal(t, linkerID(one), linkerID(build("1")))
	require.NotEqual(t, linkerID(one), linkerID(build("2")))
	require.NotEqual(t, linkerID(one), linkerID(build("1", "-tags", "none", "-ldflags", "-s")))
	require.Nil(t, linkerID(build("1", "-ldflags", "-buildid=")))
	require.Nil(t, linkerID(filepath.Join(dir, "main.go")))

	self, err := os.Executable()
	require.NoError(t, err)
	require.NotNil(t, linkerID(self))
	require.Regexp(t, "^[0-9a-f]{12,16}$", buildID())
}
