package train

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/testkit/fault"
	"github.com/spillway-ml/spillway/offload/store"
	"github.com/spillway-ml/spillway/plan"
)

// TestUnusedDiskFolder checks that a disk folder that holds no buffer is left unchanged. A path
// that cannot be a folder is refused at the start.
func TestUnusedDiskFolder(t *testing.T) {
	root := t.TempDir()
	c := tiny("gpt2")
	c.Steps = 1
	c.Disk = filepath.Join(root, "a", "b")
	runOf(t, c)
	require.NoDirExists(t, filepath.Join(root, "a"))

	c.Disk = filepath.Join(root, "mine")
	require.NoError(t, os.Mkdir(c.Disk, 0o700))
	runOf(t, c)
	entries, err := os.ReadDir(c.Disk)
	require.NoError(t, err, "the folder stays")
	require.Empty(t, entries)

	c.Disk = filepath.Join(root, "file")
	require.NoError(t, os.WriteFile(c.Disk, nil, 0o600))
	_, err = c.start(context.Background())
	require.ErrorContains(t, err, "Config.Disk "+c.Disk+": disk tier: "+c.Disk+" is not a folder")
}

func TestDiskCacheHasToFitTheHost(t *testing.T) {
	c := tiny("gpt2")
	c.Steps, c.Disk, c.HostMemory, c.DiskCache = 1, t.TempDir(), 64<<20, 60<<20
	_, err := c.start(context.Background())
	var refused *plan.DoesNotFit
	require.ErrorAs(t, err, &refused)
	require.Regexp(t, `^does not fit: a rank needs .* of host memory and .*; it fits with Config.DiskCache [0-9]+MiB or less instead of 60.00 MiB$`, err.Error())
	_, size, _ := strings.Cut(err.Error(), "Config.DiskCache ")
	var mib int64
	_, scanErr := fmt.Sscanf(size, "%dMiB", &mib)
	require.NoError(t, scanErr)
	c.DiskCache = mib << 20
	tr, err := c.start(context.Background())
	require.NoError(t, err, "as it says")
	require.NoError(t, tr.Close())
}

// TestDiskFaultsEndTheRunAndItResumes injects disk faults. The error must give the file, the offset
// and the cause. Resuming from the last checkpoint must give the bits of an undisturbed run.
func TestDiskFaultsEndTheRunAndItResumes(t *testing.T) {
	c := tiny("gpt2")
	c.poison = false // its writes would be counted
	c.Ranks, c.Steps, c.Offload, c.Disk = 2, 6, "optimizer=disk,parameters=disk", t.TempDir()
	want := runOf(t, c)
	count := &counter{}
	c.wrapDisk = count.wrap
	runOf(t, c)
	require.Positive(t, count.reads.Load())

	for _, f := range []struct {
		name, cause, op string
		plan            func(reads, writes int64) fault.FilePlan
	}{
		{"a read fails", "input/output error", "read", func(r, _ int64) fault.FilePlan { return fault.FilePlan{Read: r * 3 / 4} }},
		{"a write fails", "input/output error", "write", func(_, w int64) fault.FilePlan { return fault.FilePlan{Write: w * 3 / 4} }},
		{"the disk is full", "no space left on device", "write", func(_, w int64) fault.FilePlan { return fault.FilePlan{Full: w * 3 / 4} }},
		{"half a write", "no space left on device", "write", func(_, w int64) fault.FilePlan { return fault.FilePlan{Short: w * 3 / 4} }},
		{"a bit flips", "checksum mismatch: expected CRC32C ", "read", func(_, w int64) fault.FilePlan { return fault.FilePlan{Flip: w * 3 / 4} }},
	} {
		t.Run(f.name, func(t *testing.T) {
			c := c
			c.Checkpoint, c.SaveEvery, c.Timeout = t.TempDir(), 1, 20*time.Second
			faults := f.plan(count.reads.Load()/2, count.writes.Load()/2)
			c.wrapDisk = func(rank int, file store.RawFile) store.RawFile {
				if rank == 1 {
					return fault.WrapFile(file, faults)
				}
				return file
			}
			tr, err := c.start(context.Background())
			require.NoError(t, err)
			err = tr.Run(context.Background(), nil)
			done := tr.Done()
			require.NoError(t, tr.Close())
			var broken *store.Error
			require.ErrorAs(t, err, &broken)
			require.Equal(t, f.op, broken.Op)
			require.ErrorContains(t, err, fmt.Sprintf("disk tier: %s %d bytes at byte %d of %s", f.op, broken.Len, broken.Off, filepath.Join(c.Disk, "spillway-")))
			require.ErrorContains(t, err, "rank1 (unnamed): ")
			require.ErrorContains(t, err, f.cause)
			require.Positive(t, done, "it got somewhere")
			require.Less(t, done, c.Steps)
			entries, err := os.ReadDir(c.Disk)
			require.NoError(t, err)
			require.Empty(t, entries)

			c.wrapDisk, c.Resume = nil, true
			got := runOf(t, c)
			require.Equal(t, want.losses[len(want.losses)-len(got.losses):], got.losses)
			require.Equal(t, want.sha, got.sha)
		})
	}
}

// counter counts the file operations of all ranks.
type counter struct{ reads, writes atomic.Int64 }

func (c *counter) wrap(_ int, f store.RawFile) store.RawFile { return &counted{f, c} }

type counted struct {
	store.RawFile
	c *counter
}

func (f *counted) ReadAt(b []byte, off int64) (int, error) {
	f.c.reads.Add(1)
	return f.RawFile.ReadAt(b, off)
}

func (f *counted) WriteAt(b []byte, off int64) (int, error) {
	f.c.writes.Add(1)
	return f.RawFile.WriteAt(b, off)
}

// TestDiskCacheGivesTheSameBits checks that a disk cache reduces the bytes read and does not change
// the parameters.
func TestDiskCacheGivesTheSameBits(t *testing.T) {
	c := tiny("gpt2")
	c.Steps, c.Offload, c.Disk = 8, "optimizer=disk,parameters=disk", t.TempDir()
	want := runOf(t, c)
	var plain, cached int64
	for _, to := range []struct {
		cache int64
		read  *int64
	}{{0, &plain}, {64 << 20, &cached}} {
		c.DiskCache = to.cache
		tr, err := c.start(context.Background())
		require.NoError(t, err)
		require.NoError(t, tr.Run(context.Background(), func(r StepResult) error { *to.read += r.DiskRead; return nil }))
		sha, err := tr.ParamsSHA256()
		require.NoError(t, err)
		require.Equal(t, want.sha, sha)
		require.NoError(t, tr.Close())
	}
	require.Less(t, cached, plain)
}
