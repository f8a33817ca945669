package processes

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/cmd/spillway/internal/cli"
)

// tmpfs mounts one of that size, where this user may.
func tmpfs(t *testing.T, bytes int) string {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d", bytes)); err != nil {
		t.Skipf("mounting a tmpfs needs root: %v", err)
	}
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	return dir
}

// onDisk is the tiny run with everything on disk, two ranks and a checkpoint.
func onDisk(steps int, disk, checkpoint string, more ...string) []string {
	return tinyWith(append([]string{"--ranks", "2", "--steps", fmt.Sprint(steps), "--disk", disk, "--checkpoint", checkpoint, "--save-every", "1",
		"--offload", "optimizer=disk,parameters=disk,gradients=disk,activations=disk"}, more...)...)
}

// hash is the line with the parameters' hash.
func hash(t *testing.T, stdout string) string {
	for _, line := range strings.Split(stdout, "\n") {
		if strings.Contains(line, "SHA-256") {
			return line
		}
	}
	t.Fatalf("no hash in %q", stdout)
	return ""
}

// A full or read-only disk, or memory that can't be locked under
// --require-pinned: status 3, what it was and where; the checkpoint resumes.
func TestDiskFaultsOfTheMachine(t *testing.T) {
	want := command(onDisk(4, t.TempDir(), t.TempDir())...)
	require.Zero(t, want.status, want.stderr)
	full, readOnly, good := tmpfs(t, 64<<10), tmpfs(t, 1<<20), t.TempDir()
	require.NoError(t, unix.Mount("", readOnly, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	checkpoint := t.TempDir()
	got := command(onDisk(2, good, checkpoint)...)
	require.Zero(t, got.status, got.stderr)

	got = command(onDisk(4, full, checkpoint, "--resume")...)
	require.Equal(t, cli.ExitFault, got.status, got.stderr)
	require.Contains(t, got.stderr, "disk tier: preallocate ")
	require.Contains(t, got.stderr, " bytes at byte 0 of "+filepath.Join(full, "spillway-"))
	require.Contains(t, got.stderr, "no space left on device")

	got = command(onDisk(4, readOnly, checkpoint, "--resume")...)
	require.Equal(t, cli.ExitFault, got.status, got.stderr)
	require.Contains(t, got.stderr, "disk tier: create "+readOnly)
	require.Contains(t, got.stderr, "read-only file system")

	got = command(onDisk(4, filepath.Join(readOnly, "sub"), checkpoint, "--resume")...)
	require.Equal(t, cli.ExitFault, got.status, got.stderr)
	require.Contains(t, got.stderr, "disk tier: open folder "+filepath.Join(readOnly, "sub"))

	got = command(onDisk(4, good, checkpoint, "--resume")...)
	require.Zero(t, got.status, got.stderr)
	require.Equal(t, hash(t, want.stdout), hash(t, got.stdout))
	entries, err := os.ReadDir(good)
	require.NoError(t, err)
	require.Empty(t, entries)
}

func TestRequirePinnedIsRefusedWhereLockingIs(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	path, err := built()
	require.NoError(t, err)
	train := func(more ...string) (status int, stderr string) {
		args := tinyWith(append([]string{"--offload", "optimizer=host"}, more...)...)
		// A shell lowers the limit for what it becomes.
		cmd := exec.Command("sh", append([]string{"-c", `ulimit -l 16 && exec "$0" "$@"`, path}, args...)...)
		var errs strings.Builder
		cmd.Stderr = &errs
		done := make(chan struct{})
		go func() {
			defer close(done)
			runtime.LockOSThread() // the thread that loses the capability ends with its goroutine
			const capIPCLock = 14
			_ = unix.Prctl(unix.PR_CAPBSET_DROP, capIPCLock, 0, 0, 0) // refused to those who lack it anyway
			_ = cmd.Run()
		}()
		<-done
		return cmd.ProcessState.ExitCode(), errs.String()
	}
	status, stderr := train("--require-pinned")
	require.Equal(t, cli.ExitFault, status, stderr)
	require.Contains(t, stderr, " bytes of host memory is refused (")
	require.Contains(t, stderr, "this process may lock 16384 bytes in all (RLIMIT_MEMLOCK); raise it with `ulimit -l`")
	status, stderr = train()
	require.Zero(t, status, stderr)
	require.Equal(t, 1, strings.Count(stderr, "warning: locking "), stderr)
}

// A process that is killed while it writes to the disk leaves nothing there, and
// the next start has all of it.
func TestKilledWhileTheDiskIsInUse(t *testing.T) {
	disk, checkpoint := tmpfs(t, 4<<20), t.TempDir()
	var empty unix.Statfs_t
	require.NoError(t, unix.Statfs(disk, &empty))
	p := start(t, onDisk(100_000, disk, checkpoint, "--save-every", "5")...)
	waitFor(t, "checkpoint", func() bool {
		list, err := os.ReadDir(checkpoint)
		return err == nil && len(list) > 1
	})
	require.NoError(t, p.Process.Signal(syscall.SIGKILL))
	p.end(t)
	var after unix.Statfs_t
	require.NoError(t, unix.Statfs(disk, &after))
	require.Equal(t, empty.Bfree, after.Bfree)
	list, err := os.ReadDir(disk)
	require.NoError(t, err)
	require.Empty(t, list)
	require.NoError(t, os.RemoveAll(checkpoint))
	got := command(onDisk(2, disk, checkpoint)...)
	require.Zero(t, got.status, got.stderr)
}
