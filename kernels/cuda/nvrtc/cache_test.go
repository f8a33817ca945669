//go:build unix

package nvrtc

import (
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
)

// A cache folder that others can write is neither read nor written, with one warning.
func TestCacheOfOthers(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kernels")
	var warnings []string
	fresh := func() *cache {
		warnings = nil
		return newCache(Options{Cache: dir, Warn: func(s string) { warnings = append(warnings, s) }})
	}
	c, key := fresh(), []string{"source"}
	require.Nil(t, c.get("k.cu", "sm_80", key))
	c.put("k.cu", "sm_80", key, []byte("image of a whole cubin"))
	kept := c.get("k.cu", "sm_80", key)
	require.Equal(t, "image of a whole cubin", string(kept))
	require.Zero(t, uintptr(unsafe.Pointer(&kept[0]))%8, "the driver reads an ELF header in place")
	require.Empty(t, warnings)
	st, err := os.Stat(dir)
	require.NoError(t, err)
	require.EqualValues(t, 0o700, st.Mode().Perm())

	file := c.path("k.cu", "sm_80", key)
	for _, spoil := range []string{dir, file} {
		was, err := os.Stat(spoil)
		require.NoError(t, err)
		require.NoError(t, os.Chmod(spoil, was.Mode().Perm()|0o020))
		c = fresh()
		require.Nil(t, c.get("k.cu", "sm_80", key))
		require.Nil(t, c.get("k.cu", "sm_80", key))
		if spoil == dir {
			c.put("other.cu", "sm_80", key, []byte("image"))
			require.NoFileExists(t, c.path("other.cu", "sm_80", key))
		}
		require.Len(t, warnings, 1)
		require.Contains(t, warnings[0], "may be written by others")
		require.NoError(t, os.Chmod(spoil, was.Mode().Perm()))
		require.Equal(t, "image of a whole cubin", string(fresh().get("k.cu", "sm_80", key)))
	}
	if os.Geteuid() == 0 && os.Chown(file, 12345, -1) == nil {
		require.Nil(t, fresh().get("k.cu", "sm_80", key))
		require.Len(t, warnings, 1)
		require.Contains(t, warnings[0], "belongs to user 12345")
	}
}
