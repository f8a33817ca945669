//go:build unix

package shim

import (
	"os"
	"path/filepath"
	"sync"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// compiled returns the library of testdata/kernels.cu, made once.
func compiled(t *testing.T) *Library {
	c, err := New()
	if err == ErrNoCompiler {
		t.Skip(err)
	}
	require.NoError(t, err)
	source, err := os.ReadFile("testdata/kernels.cu")
	require.NoError(t, err)
	image, err := c.Compile("kernels.cu", string(source), driver.Device{})
	require.NoError(t, err)
	l, err := Open(image)
	require.NoError(t, err)
	return l
}

func line(n uint32) driver.Dim { return driver.Dim{X: n, Y: 1, Z: 1} }

func at[T any](v []T) driver.Address {
	return driver.Address(uintptr(unsafe.Pointer(unsafe.SliceData(v))))
}

// launch runs a kernel in both orders, on fresh copies of y, and returns y after
// each.
func launch(t *testing.T, l *Library, name string, grid, block driver.Dim, shared int, y []int32, more ...[]int32) []int32 {
	var got [2][]int32
	for order := range got {
		l.Reverse(order == 1)
		got[order] = append([]int32(nil), y...)
		args := new(driver.Args).Pointer(at(got[order])).Int32(int32(len(y)))
		for _, m := range more {
			args.Pointer(at(m))
		}
		p, _ := args.Packed()
		require.NoError(t, l.Launch(name, grid, block, shared, p))
	}
	l.Reverse(false)
	require.Equal(t, got[0], got[1], "the result depends on the order of threads")
	return got[0]
}

func TestGridAndIndices(t *testing.T) {
	l := compiled(t)
	got := launch(t, l, "indices", driver.Dim{X: 2, Y: 3, Z: 2}, driver.Dim{X: 4, Y: 2, Z: 3}, 0, make([]int32, 12*24))
	for b := range int32(12) {
		for i := range int32(24) {
			want := (b%2+10*(b/2%3)+100*(b/6))*1000 + i%4 + 10*(i/4%2) + 100*(i/8)
			require.Equal(t, want, got[b*24+i])
		}
	}
}

func TestBarriersAndSharedMemory(t *testing.T) {
	l := compiled(t)
	const n = 1000
	x := make([]int32, 3*n)
	for i := range x {
		x[i] = int32(i * i)
	}
	for _, name := range []string{"reverse_static", "reverse_dynamic"} {
		got := launch(t, l, name, line(3), line(n), 4*n, x)
		for b := range 3 {
			for i := range n {
				require.Equal(t, x[b*n+n-1-i], got[b*n+i], name)
			}
		}
	}
	// 100 barriers of 1,024 threads in 7 blocks.
	got := launch(t, l, "rotate", line(7), line(1024), 0, make([]int32, 7*1024))
	for i, v := range got {
		require.EqualValues(t, (i%1024+100)%1024, v)
	}
}

func TestSharedMemoryIsPoisonedForEveryBlock(t *testing.T) {
	got := launch(t, compiled(t), "unwritten", line(4), line(32), 64, make([]int32, 8))
	require.Equal(t, []int32{-1, -1, -1, -1, -1, -1, -1, -1}, got)
}

func TestWarpOperations(t *testing.T) {
	l := compiled(t)
	got := launch(t, l, "warp", line(1), line(64), 0, make([]int32, 64*8))
	for i := range int32(64) {
		lane, warp := i%32, i/32
		r := got[i*8:]
		require.Equal(t, 496+32*32*warp, r[0], "sum by exchange")
		require.Equal(t, warp*32+5, r[1], "broadcast")
		require.Equal(t, cond(lane < 29, i+3, i), r[2], "down")
		require.Equal(t, cond(lane < 4, i, i-4), r[3], "up")
		require.Equal(t, int32(0x55555555), r[4], "ballot of even lanes")
		require.Equal(t, i/8*8+3, r[5], "within 8 lanes")
		require.Equal(t, int32(1), r[6], "any")
		require.Equal(t, cond(lane >= 16, 16, 0), r[7], "half a warp's own sum of ones")
	}
}

func cond(c bool, a, b int32) int32 {
	if c {
		return a
	}
	return b
}

func TestVotesAndAtomics(t *testing.T) {
	got := launch(t, compiled(t), "votes", line(3), line(128), 0, make([]int32, 8))
	require.Equal(t, []int32{3 * 128 * 127 / 2, 3, 0, 3 * 43, 127, 0, 7, 3}, got)
}

func TestAfterAFailureTheNextLaunchRuns(t *testing.T) {
	l := compiled(t)
	y := make([]int32, 64)
	p, _ := new(driver.Args).Pointer(at(y)).Int32(64).Packed()
	for _, c := range []struct{ name, want string }{
		{"half_syncs", "deadlock: 32 threads wait at __syncthreads, 32 at a warp's operation, 0 have ended"},
		{"ended_lane", "names a thread that has ended"},
		{"foreign_lane", "reads a lane that its mask does not name"},
		{"misaligned", "no multiple of its size"},
	} {
		err := l.Launch(c.name, line(2), line(64), 0, p)
		require.ErrorContains(t, err, c.want, c.name)
		require.ErrorContains(t, err, "kernel "+c.name)
		launch(t, l, "rotate", line(1), line(1024), 0, make([]int32, 1024))
	}
	require.ErrorContains(t, l.Launch("rotate", line(1), line(2048), 0, p), "the kernel takes 1024 threads")
	require.ErrorContains(t, l.Launch("nothing", line(1), line(1), 0, p), "has no kernel nothing")
}

// Threads that have returned do not hold a barrier up, as on a GPU.
func TestEndedThreadsAreNoPartOfABarrier(t *testing.T) {
	got := launch(t, compiled(t), "early_return", line(1), line(96), 0, make([]int32, 96))
	require.EqualValues(t, 64, got[0])
}

func TestStructParameters(t *testing.T) {
	l := compiled(t)
	y := make([]int64, 4)
	p, _ := new(driver.Args).Pointer(at(y)).Int32(7).Int64(1).Int64(2).Int64(3).Float32(0.5).Float64(0.25).Packed()
	require.NoError(t, l.Launch("by_value", line(1), line(1), 0, p))
	require.Equal(t, []int64{7, 123, 500, 250}, y)
}

func TestCompilesOnceAndSaysWhatIsWrong(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "libraries")
	c, err := At(dir)
	if err == ErrNoCompiler {
		t.Skip(err)
	}
	require.NoError(t, err)
	const source = "KERNEL(32, k, int *y, int n) { y[0] = n; }\n"
	first, err := c.Compile("k.cu", source, driver.Device{})
	require.NoError(t, err)
	before, err := os.Stat(string(first[len(Prefix):]))
	require.NoError(t, err)
	second, err := c.Compile("k.cu", source, driver.Device{})
	require.NoError(t, err)
	require.Equal(t, first, second)
	after, err := os.Stat(string(second[len(Prefix):]))
	require.NoError(t, err)
	require.Equal(t, before.ModTime(), after.ModTime())
	_, err = c.Compile("bad.cu", "#line 7 \"bad.cu\"\nKERNEL(32, k, float *y) { atomicAdd(y, 1.0f); }\n", driver.Device{})
	require.ErrorContains(t, err, "bad.cu:7")
	left, err := filepath.Glob(filepath.Join(dir, "*.tmp"))
	require.NoError(t, err)
	require.Empty(t, left)
}

// A folder, or a library in it, that others may write is not loaded from; the
// library runs all the same and leaves nothing behind.
func TestFolderOfOthers(t *testing.T) {
	dir, temp := filepath.Join(t.TempDir(), "libraries"), t.TempDir()
	t.Setenv("TMPDIR", temp)
	c, err := At(dir)
	if err == ErrNoCompiler {
		t.Skip(err)
	}
	require.NoError(t, err)
	var warnings []string
	c.warn = func(s string) { warnings = append(warnings, s) }
	const source = "KERNEL(32, k, int *y, int n) { y[0] = n + 3; }\n"
	image, err := c.Compile("k.cu", source, driver.Device{})
	require.NoError(t, err)
	library := string(image[len(Prefix):])
	require.Equal(t, dir, filepath.Dir(library))
	st, err := os.Stat(dir)
	require.NoError(t, err)
	require.EqualValues(t, 0o700, st.Mode().Perm())
	require.Empty(t, warnings)
	require.NoError(t, os.WriteFile(library, []byte("of somebody else"), 0o700))
	for _, spoil := range []string{library, dir} {
		require.NoError(t, os.Chmod(spoil, 0o777))
		image, err = c.Compile("k.cu", source, driver.Device{})
		require.NoError(t, err)
		require.NotContains(t, string(image), dir)
		l, err := Open(image)
		require.NoError(t, err)
		launch(t, l, "k", line(1), line(32), 0, make([]int32, 1))
		left, err := os.ReadDir(temp)
		require.NoError(t, err)
		for _, e := range left {
			require.NotContains(t, e.Name(), "spillway-shim-")
		}
		require.NoError(t, os.Chmod(spoil, 0o700))
	}
	require.Len(t, warnings, 1)
	require.Contains(t, warnings[0], "may be written by others")
}

// Streams launch from threads of their own.
func TestConcurrentLaunches(t *testing.T) {
	l := compiled(t)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 5 {
				y := make([]int32, 2*1024)
				p, _ := new(driver.Args).Pointer(at(y)).Int32(int32(len(y))).Packed()
				assert.NoError(t, l.Launch("rotate", line(2), line(1024), 0, p))
				for i, v := range y {
					if v != int32((i+100)%1024) {
						assert.EqualValues(t, (i+100)%1024, v)
						return
					}
				}
			}
		})
	}
	wg.Wait()
}
