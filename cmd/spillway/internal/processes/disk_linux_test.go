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

// tmpfs mounts a tmpfs of that size, if this user may.
func tmpfs(t *testing.T, bytes int) string {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d", bytes)); err != nil {
		t.Skipf("mounting a tmpfs needs root: %v", err)
	}
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	return dir
}

// onDisk returns the arguments of the tiny run with everything on disk, two ranks and a checkpoint.
func onDisk(steps int, disk, checkpoint string, more ...string) []string {
	return tinyWith(append([]string{"--ranks", "2", "--steps", fmt.Sprint(steps), "--disk", disk, "--checkpoint", checkpoint, "--save-every", "1",
		"--offload", "optimizer=disk,parameters=disk,gradients=disk,activations=disk"}, more...)...)
}

// hash returns the line with the parameters' hash.
func hash(t *testing.T, stdout string) string {
	for _, line := range strings.Split(stdout, "\n") {
		if strings.Contains(line, "SHA-256") {
			return line
		}
	}
	t.Fatalf("no hash in %q", stdout)
	return ""
}

// A disk without space does not fit, and an unwritable folder is bad input, before the run starts.
// The checkpoint resumes on another disk.
func TestDisksThatCannotBeUsed(t *testing.T) {
	want := command(onDisk(4, t.TempDir(), t.TempDir())...)
	require.Zero(t, want.status, want.stderr)
	full, readOnly, good := tmpfs(t, 64<<10), tmpfs(t, 1<<20), t.TempDir()
	require.NoError(t, unix.Mount("", readOnly, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	checkpoint := t.TempDir()
	got := command(onDisk(2, good, checkpoint)...)
	require.Zero(t, got.status, got.stderr)

	for _, folder := range []string{full, filepath.Join(full, "sub")} {
		got = command(onDisk(4, folder, checkpoint, "--resume")...)
		require.Equal(t, cli.ExitDoesNotFit, got.status, got.stderr)
		require.Regexp(t, `(?m)^spillway: does not fit: the disk tier takes [0-9.]+ KiB, and the file system of --disk `+folder+` has 64.00 KiB free; free [0-9.]+ KiB there, or give`, got.stderr)
		entries, err := os.ReadDir(full)
		require.NoError(t, err)
		require.Empty(t, entries)
	}

	if !testing.Short() { // a job over processes says the same, and the ways out
		args := tinyWith("--disk", full, "--offload", "optimizer=disk", "--checkpoint", "none")
		p := start(t, launched(2, args...)...)
		require.Equal(t, cli.ExitDoesNotFit, p.end(t), p.errs.String())
		require.Regexp(t, `(?m)^spillway: does not fit: the disk tier takes [0-9.]+ KiB, and free in --disk `+full+
			` are 64.00 KiB of host \S+ for 2 ranks; free [0-9.]+ KiB there, `+
			`or give a folder of another file system; it fits as:\n  spillway launch`, p.errs.String())
	}

	got = command(tinyWith("--disk", full, "--freeze", "wte.*,wpe.*,h.0.*", "--frozen-cache", "disk:1MiB")...)
	require.Equal(t, cli.ExitDoesNotFit, got.status, got.stderr)
	require.Contains(t, got.stderr, "spillway: does not fit: the disk tier takes 388.00 KiB, and the file system of --disk "+full+" has 64.00 KiB free")

	got = command(onDisk(4, readOnly, checkpoint, "--resume")...)
	require.Equal(t, cli.ExitBadInput, got.status, got.stderr)
	require.Contains(t, got.stderr, "spillway: --disk "+readOnly+": folder "+readOnly+" can't be written: read-only file system; give a folder that can\n")
	got = command(tinyWith("--disk", readOnly)...)
	require.Zero(t, got.status, "it is not used: %s", got.stderr)

	sub := filepath.Join(readOnly, "sub")
	got = command(onDisk(4, sub, checkpoint, "--resume")...)
	require.Equal(t, cli.ExitBadInput, got.status, got.stderr)
	require.Contains(t, got.stderr, "spillway: --disk "+sub+": disk tier: open folder "+sub+": read-only file system\n")

	got = command(onDisk(4, good, checkpoint, "--resume")...)
	require.Zero(t, got.status, got.stderr)
	require.Equal(t, hash(t, want.stdout), hash(t, got.stdout))
	entries, err := os.ReadDir(good)
	require.NoError(t, err)
	require.Empty(t, entries)
}

// Folders that this user may not write are rejected with the flag and the cause.
func TestOutputsThatMayNotBeWritten(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	dir := t.TempDir()
	closed := filepath.Join(dir, "closed")
	require.NoError(t, os.Mkdir(closed, 0o555))
	model, text := filepath.Join(dir, "m"), filepath.Join(dir, "t.bin")
	require.NoError(t, os.CopyFS(model, os.DirFS(testdata+"/gpt2")))
	tokens, err := os.ReadFile(testdata + "/text.bin")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(text, tokens, 0o644))
	path := filepath.Join(dir, "spillway")
	at, err := built()
	require.NoError(t, err)
	require.NoError(t, os.Link(at, path))
	for ; dir != "/"; dir = filepath.Dir(dir) { // make the path accessible to the other user
		if st, err := os.Stat(dir); err == nil && st.Mode().Perm()&0o001 == 0 {
			require.NoError(t, os.Chmod(dir, st.Mode().Perm()|0o055))
		}
		if dir == os.TempDir() {
			break
		}
	}
	for words, flags := range map[string][]string{
		"--disk " + closed + ": folder " + closed + " can't be written: permission denied;": {"--offload", "optimizer=disk", "--disk", closed},
		"--metrics: open " + filepath.Join(closed, "m") + ": permission denied\n":           {"--metrics", filepath.Join(closed, "m")},
		"--disk " + filepath.Join(closed, "d") + ": disk tier: ":                            {"--disk", filepath.Join(closed, "d")},
	} {
		cmd := exec.Command(path, append([]string{"train", "--model", model, "--data", text, "--batch", "1", "--seq", "16", "--steps", "1"}, flags...)...)
		cmd.Env = append(os.Environ(), "HOME=/")
		if os.Getuid() == 0 {
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		}
		var errs strings.Builder
		cmd.Stderr = &errs
		_ = cmd.Run()
		require.Equal(t, cli.ExitBadInput, cmd.ProcessState.ExitCode(), errs.String())
		require.Contains(t, errs.String(), "spillway: "+words)
	}
}

func TestRequirePinnedIsRefusedWhereLockingIs(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	path, err := built()
	require.NoError(t, err)
	train := func(more ...string) (status int, stderr string) {
		args := tinyWith(append([]string{"--offload", "optimizer=host"}, more...)...)
		// The shell lowers the limit for the program that replaces it.
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

// A process killed while it writes to the disk leaves no files there, and the next start has all
// the space.
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
