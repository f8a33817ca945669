package nvrtc_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/device/cuda/dynlib"
	"github.com/spillway-ml/spillway/kernels/cuda"
	"github.com/spillway-ml/spillway/kernels/cuda/nvrtc"
)

// open opens NVRTC, or skips the test if it is not found.
func open(t testing.TB, o nvrtc.Options) *nvrtc.Compiler {
	c, err := nvrtc.Open(o)
	var missing *dynlib.NotFound
	if errors.As(err, &missing) {
		t.Skipf("%v", err)
	}
	require.NoError(t, err)
	return c
}

var ampere = driver.Device{Major: 8}

const tiny = `extern "C" __global__ void tiny(float *y) { y[threadIdx.x] = 2; }`

// requireCubin checks the header of a CUDA ELF file, whose version Go's debug/elf does not know.
func requireCubin(t *testing.T, image []byte) {
	require.Greater(t, len(image), 64)
	require.Equal(t, "\x7fELF\x02\x01", string(image[:6]))
	require.EqualValues(t, 190, binary.LittleEndian.Uint16(image[18:]), "EM_CUDA")
}

// TestEverySourceCompiles compiles every source for current cards. Earlier results come from the
// user's cache.
func TestEverySourceCompiles(t *testing.T) {
	c := open(t, nvrtc.Options{})
	t.Logf("NVRTC %s, %s", c.Version(), c.Path())
	for _, dev := range []driver.Device{{Major: 8}, {Major: 9}} {
		for _, name := range cuda.Sources() {
			source, err := cuda.Source(name)
			require.NoError(t, err)
			start := time.Now()
			image, err := c.Compile(name, source, dev)
			require.NoError(t, err)
			t.Logf("%s for sm_%d0: %d KB in %.1f s", name, dev.Major, len(image)/1000, time.Since(start).Seconds())
			requireCubin(t, image)
		}
	}
}

func TestCompilationErrorHasTheLog(t *testing.T) {
	c := open(t, nvrtc.Options{Cache: "-"})
	_, err := c.Compile("bad.cu", "#line 5 \"bad.cu\"\n__global__ void f() { nothing(); }", ampere)
	require.ErrorContains(t, err, "nvrtc: bad.cu (NVRTC "+c.Version())
	require.ErrorContains(t, err, "NVRTC_ERROR_COMPILATION (6)")
	require.ErrorContains(t, err, "bad.cu(5)")
	require.ErrorContains(t, err, `identifier "nothing" is undefined`)
}

func TestCards(t *testing.T) {
	c := open(t, nvrtc.Options{Cache: "-"})
	image, err := c.Compile("tiny.cu", tiny, driver.Device{Major: 8, Minor: 6})
	require.NoError(t, err)
	requireCubin(t, image)
	// For a future card the result is PTX, which its driver translates.
	image, err = c.Compile("tiny.cu", tiny, driver.Device{Major: 99})
	require.NoError(t, err)
	require.Contains(t, string(image), ".version")
	require.Zero(t, image[len(image)-1], "PTX ends in a zero byte")
	_, err = c.Compile("tiny.cu", tiny, driver.Device{Major: 1})
	require.ErrorContains(t, err, "the card has 1.0")
}

func TestCache(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "made", "later")
	var warnings []string
	c := open(t, nvrtc.Options{Cache: dir, Warn: func(s string) { warnings = append(warnings, s) }})
	files := func() []string {
		list, err := filepath.Glob(filepath.Join(dir, "*"))
		require.NoError(t, err)
		return list
	}
	first, err := c.Compile("tiny.cu", tiny, ampere)
	require.NoError(t, err)
	require.Len(t, files(), 1)
	require.Contains(t, files()[0], "tiny-sm_80-")

	// A cached file is returned without compiling again.
	entry := files()[0]
	whole, err := os.ReadFile(entry)
	require.NoError(t, err)
	again, err := c.Compile("tiny.cu", tiny, ampere)
	require.NoError(t, err)
	require.Equal(t, first, again)
	_, err = c.Compile("tiny.cu", tiny, driver.Device{Major: 9})
	require.NoError(t, err)
	_, err = c.Compile("tiny.cu", tiny+"\n", ampere)
	require.NoError(t, err)
	require.Len(t, files(), 3, "another card and another source are other files")
	require.Empty(t, warnings)

	// A damaged file gives a warning and the right image, and is replaced.
	for name, spoil := range map[string]func([]byte) []byte{
		"empty":     func(b []byte) []byte { return nil },
		"cut":       func(b []byte) []byte { return b[:len(b)-9] },
		"flipped":   func(b []byte) []byte { b[len(b)/2] ^= 4; return b },
		"something": func(b []byte) []byte { return []byte(strings.Repeat("x", 500)) },
	} {
		warnings = nil
		require.NoError(t, os.WriteFile(entry, spoil(bytes.Clone(whole)), 0o644))
		again, err = c.Compile("tiny.cu", tiny, ampere)
		require.NoError(t, err, name)
		require.Equal(t, first, again, name)
		require.Len(t, warnings, 1, name)
		require.Contains(t, warnings[0], "broken, tiny.cu is compiled again")
		restored, err := os.ReadFile(entry)
		require.NoError(t, err)
		require.Equal(t, whole, restored, name)
	}
}

// A folder that cannot be created, and an entry that cannot be read.
func TestCacheThatCannotBeWritten(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o644))
	var warnings []string
	c := open(t, nvrtc.Options{Cache: filepath.Join(file, "cache"), Warn: func(s string) { warnings = append(warnings, s) }})
	image, err := c.Compile("tiny.cu", tiny, ampere)
	require.NoError(t, err)
	requireCubin(t, image)
	require.NotEmpty(t, warnings)
	require.Contains(t, warnings[len(warnings)-1], "the compiled kernels of tiny.cu are not kept")
	if os.Getuid() == 0 {
		return // root can write everywhere
	}
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o500))
	warnings = nil
	c = open(t, nvrtc.Options{Cache: dir, Warn: func(s string) { warnings = append(warnings, s) }})
	_, err = c.Compile("tiny.cu", tiny, ampere)
	require.NoError(t, err)
	require.Len(t, warnings, 1)
}

func TestNotFoundSaysWhereItLooked(t *testing.T) {
	_, err := nvrtc.Open(nvrtc.Options{Cache: "-"})
	if err == nil {
		t.Skip("NVRTC is here")
	}
	require.ErrorContains(t, err, "libnvrtc.so.12")
	require.ErrorContains(t, err, "SPILLWAY_CUDA_LIBS")
}
