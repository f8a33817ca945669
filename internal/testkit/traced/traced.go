// Package traced checks the system calls of a program.
package traced

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const calls = "trace=open,openat,openat2,creat,mkdir,mkdirat,mknod,mknodat,unlink,unlinkat,rmdir,rename,renameat,renameat2,link,linkat,symlink,symlinkat"

var (
	changing = regexp.MustCompile(`O_CREAT|O_TMPFILE|creat\(|mkdir|mknod|unlink|rmdir|rename|link`)
	byPath   = regexp.MustCompile(`AT_FDCWD|"/|(mkdir|mknod|unlink|rmdir|rename|open|creat|link|symlink)\("`)
)

// NothingByPath runs a command under strace. The command must not create, rename or remove a file
// whose name matches ours by path, only relative to an open folder. It returns the number of such
// calls, and skips the test if strace is not installed.
func NothingByPath(t *testing.T, cmd *exec.Cmd, ours string) int {
	t.Helper()
	strace, err := exec.LookPath("strace")
	if err != nil {
		t.Skip("strace is not installed: system calls are not looked at")
	}
	log := filepath.Join(t.TempDir(), "log")
	cmd.Args = append([]string{strace, "-f", "-o", log, "-e", calls, cmd.Path}, cmd.Args[1:]...)
	cmd.Path = strace
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%q: %s", cmd.Args, out)
	text, err := os.ReadFile(log)
	require.NoError(t, err)
	names, changes := regexp.MustCompile(ours), 0
	for line := range strings.Lines(string(text)) {
		if changing.MatchString(line) && names.MatchString(line) {
			changes++
			require.NotRegexp(t, byPath, line, "%q", cmd.Args)
		}
	}
	return changes
}
