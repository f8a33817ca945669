package store

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
)

// mountTmpfs mounts a tmpfs of the given size, or skips the test if this user may not.
func mountTmpfs(t *testing.T, bytes int64) string {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d", bytes)); err != nil {
		t.Skipf("mounting a tmpfs needs root: %v", err)
	}
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	return dir
}

func freeBytes(t *testing.T, dir string) int64 {
	var s unix.Statfs_t
	require.NoError(t, unix.Statfs(dir, &s))
	return int64(s.Bavail) * s.Bsize
}

func TestFullDiskAtPreallocation(t *testing.T) {
	dir := mountTmpfs(t, 1<<20)
	f := open(t, dir, small())
	create(t, f, 512<<10, 0)
	_, err := f.Create(1, 768<<10, 0)
	var e *Error
	require.ErrorAs(t, err, &e)
	require.ErrorIs(t, err, unix.ENOSPC)
	require.Equal(t, int64(768<<10), e.Len)
	require.ErrorContains(t, err, fmt.Sprintf("disk tier: preallocate 786432 bytes at byte 0 of %s/spillway-%d-rank1 (unnamed): no space left on device (512 KiB are free there)", dir, os.Getpid()))
	create(t, f, 500<<10, 0) // the failed reservation was released
}

// On a filesystem that cannot reserve space, a full disk is reported by the write.
func TestFullDiskAtWrite(t *testing.T) {
	dir := mountTmpfs(t, 1<<20)
	f := create(t, open(t, dir, small()), 900<<10, 0)
	// Release the reserved space and let another file use it.
	require.NoError(t, f.file.Truncate(0))
	require.NoError(t, f.file.Truncate(900<<10))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "other"), make([]byte, 600<<10), 0o600))
	mem := make([]byte, 900<<10)
	fillBytes(mem, 1)
	err := f.Store(mem, 0).Run()
	var e *Error
	require.ErrorAs(t, err, &e)
	require.ErrorIs(t, err, unix.ENOSPC)
	require.ErrorContains(t, err, fmt.Sprintf("disk tier: write 16384 bytes at byte %d of %s", e.Off, f.name))
}

func TestReadOnlyFolder(t *testing.T) {
	dir := mountTmpfs(t, 1<<20)
	require.NoError(t, unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	f, err := Open(dir, small())
	require.NoError(t, err, "a folder that is not used may be read-only")
	_, err = f.Create(0, 4096, 0)
	var e *Error
	require.ErrorAs(t, err, &e)
	require.ErrorContains(t, err, "disk tier: create "+dir)
	require.ErrorContains(t, err, "read-only file system")
	require.NoError(t, f.Close())

	_, err = Open(filepath.Join(dir, "sub"), small())
	require.NotErrorAs(t, err, &e, "the path is at fault, as one that may not be written")
	require.EqualError(t, err, "disk tier: open folder "+dir+"/sub: read-only file system")
}

func TestFolderThatVanishes(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "disk")
	require.NoError(t, os.Mkdir(dir, 0o777))
	f := open(t, dir, small())
	file := create(t, f, 40_000, 0)
	require.NoError(t, os.Remove(dir))
	// An open file keeps working ...
	mem := make([]byte, 40_000)
	require.NoError(t, file.Store(mem, 0).Run())
	require.NoError(t, file.Load(mem, 0).Run())
	// ... but no new file is created in the folder's place.
	_, err := f.Create(1, 4096, 0)
	require.ErrorContains(t, err, "disk tier: create "+dir)
	require.ErrorIs(t, err, unix.ENOENT)

	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	_, err = Open(path, small())
	require.EqualError(t, err, "disk tier: "+path+" is not a folder")
}

func TestTwoJobsInOneFolder(t *testing.T) {
	for _, named := range []bool{false, true} {
		dir := filepath.Join(t.TempDir(), "disk")
		o := small()
		o.named = named
		a, err := Open(dir, o)
		require.NoError(t, err)
		b, err := Open(dir, o)
		require.NoError(t, err)
		fa, fb := create(t, a, 50_000, 0), create(t, b, 50_000, 0)
		ma, mb := make([]byte, 50_000), make([]byte, 50_000)
		fillBytes(ma, 1)
		fillBytes(mb, 2)
		require.NoError(t, errors.Join(fa.Store(ma, 0).Run(), fb.Store(mb, 0).Run()))
		require.NoError(t, errors.Join(fa.Load(ma, 0).Run(), fb.Load(mb, 0).Run()))
		require.Equal(t, [2]byte{1, 2}, [2]byte{ma[49_999], mb[49_999]})
		require.NoError(t, a.Close())
		require.DirExists(t, dir, "the other job has it still")
		create(t, b, 4096, 0)
		require.NoError(t, fb.Load(mb, 0).Run())
		require.NoError(t, b.Close())
	}
}

// Concurrent jobs start and end in a folder that each of them creates and removes.
func TestJobsThatStartAndEndTogether(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "x", "y")
	errs := make(chan error)
	for range 6 {
		go func() {
			for range 20 {
				f, err := Open(dir, Options{Block: Page, Depth: 1, named: true})
				if err == nil {
					_, err = f.Create(0, 4096, 0)
					err = errors.Join(err, f.Close())
				}
				if err != nil {
					errs <- err
					return
				}
			}
			errs <- nil
		}()
	}
	for range 6 {
		require.NoError(t, <-errs)
	}
}

func TestKilledWhileWriting(t *testing.T) {
	dir := mountTmpfs(t, 2<<20)
	before := freeBytes(t, dir)
	// A killed job's stale file is removed at the next start, even if it was killed before it
	// unlinked the file. Files that are not the tier's are kept.
	stale := filepath.Join(dir, ".spillway-1-0-0000abcd.disk")
	other := filepath.Join(dir, ".spillway-notes")
	require.NoError(t, os.WriteFile(other, nil, 0o600))
	for range 3 {
		require.NoError(t, os.WriteFile(stale, make([]byte, 100), 0o600))
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "SPILLWAY_TEST_WRITER="+dir)
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		word := make([]byte, 7)
		_, err = out.Read(word)
		require.NoError(t, err)
		require.Equal(t, "writing", string(word))
		require.NoError(t, cmd.Process.Signal(syscall.SIGKILL))
		require.Error(t, cmd.Wait())
		require.NoFileExists(t, stale)
	}
	// The space is free again, so the next start can use the whole disk.
	require.Eventually(t, func() bool { return freeBytes(t, dir) == before }, time.Minute, 10*time.Millisecond)
	f := open(t, dir, small())
	create(t, f, 2<<20-64<<10, 0)
	require.FileExists(t, other)
}

// A file keeps its name if its owner was stopped between creating and unlinking it. It is not
// removed while the owner holds its lock.
func TestALockedFileIsNotStale(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, ".spillway-1-0-0000abcd.disk")
	owner, err := os.Create(path)
	require.NoError(t, err)
	require.NoError(t, unix.Flock(int(owner.Fd()), unix.LOCK_EX))
	open(t, dir, small())
	require.FileExists(t, path)
	require.NoError(t, owner.Close())
	open(t, dir, small())
	require.NoFileExists(t, path)
}

func TestDirectIOWhereTheFilesystemHasIt(t *testing.T) {
	f := create(t, open(t, t.TempDir(), small()), 10_000, 0)
	flags, err := unix.FcntlInt(f.file.Fd(), unix.F_GETFL, 0)
	require.NoError(t, err)
	if flags&unix.O_DIRECT == 0 {
		t.Skipf("the filesystem of the temporary folder (%s) has no direct I/O", FilesystemOf(t.TempDir()))
	}
	require.Greater(t, f.memAlign, uintptr(1))

	o := small()
	o.Buffered = true
	f = create(t, open(t, t.TempDir(), o), 10_000, 0)
	flags, err = unix.FcntlInt(f.file.Fd(), unix.F_GETFL, 0)
	require.NoError(t, err)
	require.Zero(t, flags&unix.O_DIRECT)
}

// A filesystem without direct I/O and without reservations is used anyway, with one warning.
func TestBufferedWithAWarning(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("ramfs", dir, "ramfs", 0, ""); err != nil {
		t.Skipf("mounting a ramfs needs root: %v", err)
	}
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	var told []string
	o := small()
	o.Warn = func(s string) { told = append(told, s) }
	f := open(t, dir, o)
	file := create(t, f, 50_000, 0)
	create(t, f, 10_000, 0)
	flags, err := unix.FcntlInt(file.file.Fd(), unix.F_GETFL, 0)
	require.NoError(t, err)
	require.Zero(t, flags&unix.O_DIRECT)
	require.Equal(t, []string{"disk tier: " + dir + ": no direct I/O (the filesystem refuses it); reads and writes go through the page cache, which takes memory beyond the plan"}, told)
	mem := make([]byte, 50_000)
	fillBytes(mem, 3)
	require.NoError(t, file.Store(mem, 0).Run())
	clear(mem)
	require.NoError(t, file.Load(mem, 0).Run())
	require.Equal(t, [2]byte{3, 3}, [2]byte{mem[0], mem[49_999]})
}

func TestFilesystemName(t *testing.T) {
	const text = `22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:25 / /mnt/with\040space rw - tmpfs tmpfs rw
31 30 0:26 / /mnt/with\040space rw - xfs /dev/vdb rw
32 22 0:27 / /mnt/with rw - btrfs /dev/vdc rw
broken line
`
	for path, want := range map[string]string{
		"/":                       "ext4 /dev/vda /",
		"/mnt":                    "ext4 /dev/vda /",
		"/mnt/with/x":             "btrfs /dev/vdc /mnt/with",
		"/mnt/with space":         "xfs /dev/vdb /mnt/with space",
		"/mnt/with space/below/x": "xfs /dev/vdb /mnt/with space",
		"/mnt/without":            "ext4 /dev/vda /",
	} {
		require.Equal(t, want, filesystemIn(text, path), path)
	}
	dir := t.TempDir()
	require.Equal(t, FilesystemOf(dir), FilesystemOf(filepath.Join(dir, "not", "there")))
	require.Equal(t, 3, len(strings.Fields(FilesystemOf(dir))))
}

func TestTuningsAreKeptByFilesystem(t *testing.T) {
	home := t.TempDir()
	ownworld.Config(t, home)
	dir := t.TempDir()
	none, err := LoadTuning(dir)
	require.NoError(t, err)
	require.Zero(t, none)
	want := Tuning{Block: 256 << 10, Depth: 7, ReadBytesPerSec: 1e9, WriteBytesPerSec: 2e9, Measured: time.Unix(1e9, 0).UTC()}
	path, err := SaveTuning(dir, want)
	require.NoError(t, err)
	require.Equal(t, filepath.Join(home, "spillway", "doctor.json"), path)
	got, err := LoadTuning(dir)
	require.NoError(t, err)
	require.Equal(t, want, got)
	f := open(t, dir, Options{Block: got.Block})
	require.Equal(t, [2]int{256 << 10, DefaultDepth}, [2]int{f.Block(), f.Depth()}, "what lies in a user's folder steers nobody who did not ask")

	for _, bad := range []string{"{", `{"disks": 3}`} {
		require.NoError(t, os.WriteFile(path, []byte(bad), 0o600))
		got, err = LoadTuning(dir)
		require.ErrorContains(t, err, "doctor.json can't be used")
		require.Zero(t, got)
	}
	_, err = SaveTuning(dir, want)
	require.NoError(t, err, "a damaged file is replaced")
	_, err = SaveTuning(dir, Tuning{Block: 5, Depth: 1})
	require.NoError(t, err)
	got, err = LoadTuning(dir)
	require.NoError(t, err)
	require.Zero(t, got, "nonsense counts as not measured")
}
