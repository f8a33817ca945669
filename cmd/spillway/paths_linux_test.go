package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Checkpoints, the lock, the marks and the disk tier are made, renamed and removed in folders
// that are open, never by a path: also in a job of two processes and by ckpt reshard and
// ckpt reshard.
func TestNothingIsChangedByPath(t *testing.T) {
	strace, err := exec.LookPath("strace")
	if err != nil {
		t.Skip("strace is not installed: system calls are not looked at")
	}
	if testing.Short() {
		t.Skip("starts processes")
	}
	program, err := built()
	require.NoError(t, err)
	top := t.TempDir()
	ck, disk, log := filepath.Join(top, "made", "ck"), filepath.Join(top, "tier"), filepath.Join(t.TempDir(), "log")
	train := tinyWith("--steps", "3", "--save-every", "1", "--keep", "1", "--checkpoint", ck, "--offload", "optimizer=disk", "--disk", disk)
	on := tinyWith("--steps", "5", "--save-every", "1", "--keep", "1", "--checkpoint", ck, "--resume", "--offload", "optimizer=disk", "--disk", disk)
	byPath := regexp.MustCompile(`AT_FDCWD|"/|(mkdir|unlink|rmdir|rename|open|creat|link|symlink)\("`)
	ours := regexp.MustCompile(`step-0|\.spillway|rank-0|manifest|\.writing|\.gone|O_TMPFILE|` + regexp.QuoteMeta(top))
	for _, args := range [][]string{
		train,
		append([]string{"launch", "-n", "2", "--restarts", "1", "--"}, on...),
		{"ckpt", "reshard", ck, "--ranks", "2"},
	} {
		cmd := exec.Command(strace, append([]string{"-f", "-o", log, "-e", "trace=open,openat,openat2,creat,mkdir,mkdirat,unlink,unlinkat,rmdir,rename,renameat,renameat2,link,linkat,symlink,symlinkat", program}, args...)...)
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%q: %s", args, out)
		text, err := os.ReadFile(log)
		require.NoError(t, err)
		changes := 0
		for line := range strings.Lines(string(text)) {
			if regexp.MustCompile(`O_CREAT|O_TMPFILE|creat\(|mkdir|unlink|rmdir|rename|link`).MatchString(line) && ours.MatchString(line) {
				changes++
				require.NotRegexp(t, byPath, line, "%q", args)
			}
		}
		require.Greater(t, changes, 3, "%q", args)
	}
}
