package pages

import (
	"hash/crc32"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const smaps = `00400000-00410000 r--p 00000000 fe:00 99 /opt/a b/spillway
Rss:                  64 kB
Anonymous:             0 kB
Swap:                  0 kB
00410000-0117c000 r-xp 00010000 fe:00 99 /opt/a b/spillway
Anonymous:             0 kB
0215a000-0215b000 r--p 01d59000 fe:00 99 /opt/a b/spillway
Anonymous:             4 kB
0215b000-0215c000 r--p 01d5a000 fe:00 99 /opt/a b/spillway
Anonymous:             0 kB
Swap:                  4 kB
0215c000-0225a000 rw-p 01d5b000 fe:00 99 /opt/a b/spillway
Anonymous:             0 kB
0225a000-042b8000 rw-p 00000000 00:00 0
Anonymous:           160 kB
7f7ea912c000-7f7ea9152000 r--p 00000000 fe:00 32 /usr/lib/libc.so.6
Anonymous:             0 kB
7f7ea9200000-7f7ea9210000 r--s 00000000 fe:00 99 /opt/a b/spillway
Anonymous:             0 kB
`

// A mapping with a written page is excluded: its data would be lost.
func TestReadOnly(t *testing.T) {
	t.Parallel()
	require.Equal(t, []mapping{{0x400000, 0x410000}, {0x410000, 0x117c000}}, readOnly([]byte(smaps), "/opt/a b/spillway"))
	require.Empty(t, readOnly([]byte(smaps), "/opt/a"))
	require.Equal(t, mapping{}, addresses("12-1"))
	require.Equal(t, mapping{}, addresses("x-1"))
	require.Equal(t, mapping{}, addresses("1"))
}

// The mappings of this test's program are divided: no read-only one is larger than a window.
func TestWindows(t *testing.T) {
	t.Parallel()
	require.NotEmpty(t, own)
	path, err := os.Readlink("/proc/self/exe")
	require.NoError(t, err)
	text, err := os.ReadFile("/proc/self/smaps")
	require.NoError(t, err)
	parts, whole := readOnly(text, path), uintptr(0)
	for _, m := range parts {
		require.LessOrEqual(t, m.end-m.start, uintptr(window))
		require.Equal(t, m.start/window, (m.end-1)/window, "a fault's window crosses mappings")
		whole += m.end - m.start
	}
	for _, m := range own {
		whole -= m.end - m.start
	}
	require.Zero(t, whole)
}

// Leave releases pages, and pages used again have the same contents.
func TestLeave(t *testing.T) {
	read := func() []byte {
		text, err := os.ReadFile("/proc/self/smaps")
		require.NoError(t, err)
		return text
	}
	memory, err := os.Open("/proc/self/mem")
	require.NoError(t, err)
	defer func() { require.NoError(t, memory.Close()) }()
	sum := func() (all uint32) { // makes every page resident
		for _, m := range own {
			page := make([]byte, m.end-m.start)
			_, err := memory.ReadAt(page, int64(m.start))
			require.NoError(t, err)
			all = crc32.Update(all, crc32.IEEETable, page)
		}
		return all
	}
	before := sum()
	path, err := os.Readlink("/proc/self/exe")
	require.NoError(t, err)
	whole := resident(read(), path)
	Leave()
	require.Less(t, resident(read(), path), whole*3/4)
	require.Equal(t, before, sum())
}

// resident returns the resident size of a path's mappings in kB.
func resident(smaps []byte, path string) (kilobytes int) {
	ours := false
	for line := range strings.Lines(string(smaps)) {
		f := strings.Fields(line)
		switch {
		case !strings.HasSuffix(f[0], ":"):
			ours = strings.HasSuffix(strings.TrimSpace(line), " "+path)
		case ours && f[0] == "Rss:":
			n, _ := strconv.Atoi(f[1])
			kilobytes += n
		}
	}
	return kilobytes
}
