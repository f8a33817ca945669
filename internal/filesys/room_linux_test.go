package filesys

import (
	"math"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// Free space computed from the kernel's figures, and figures that give no answer.
func TestRoomOfFigures(t *testing.T) {
	disk := unix.Statfs_t{Type: unix.EXT4_SUPER_MAGIC, Bsize: 4096, Blocks: 100, Bfree: 30, Bavail: 10}
	for _, c := range []struct {
		what  string
		edit  func(s *unix.Statfs_t)
		root  bool
		want  Room
		known bool
	}{
		{"a user", func(*unix.Statfs_t) {}, false, Room{10 * 4096, 10 * 4096, 4096}, true},
		{"root", func(*unix.Statfs_t) {}, true, Room{10 * 4096, 30 * 4096, 4096}, true},
		{"a full disk", func(s *unix.Statfs_t) { s.Bfree, s.Bavail = 0, 0 }, true, Room{Block: 4096}, true},
		{"without figures", func(s *unix.Statfs_t) { s.Blocks, s.Bfree, s.Bavail = 0, 0, 0 }, false, Room{}, false},
		{"a network's zero", func(s *unix.Statfs_t) { s.Type, s.Bfree, s.Bavail = unix.FUSE_SUPER_MAGIC, 0, 0 }, false, Room{}, false},
		{"a network's figures", func(s *unix.Statfs_t) { s.Type = unix.NFS_SUPER_MAGIC }, false, Room{10 * 4096, 10 * 4096, 4096}, true},
		{"without end", func(s *unix.Statfs_t) { s.Bfree, s.Bavail = math.MaxUint64, math.MaxUint64 }, true, Room{math.MaxInt64, math.MaxInt64, 4096}, true},
	} {
		s := disk
		c.edit(&s)
		got, known := roomOf(&s, c.root)
		require.Equal(t, c.known, known, c.what)
		require.Equal(t, c.want, got, c.what)
	}
}

// The room of a folder that does not exist is that of the nearest existing folder above it.
func TestRoomOfAFolderToBeMade(t *testing.T) {
	dir := t.TempDir()
	_, known := RoomAt(System, dir)
	require.True(t, known)
	_, known = RoomAt(System, filepath.Join(dir, "a", "b"))
	require.True(t, known)
}
