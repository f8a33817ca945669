package store

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/testkit/fault"
	"github.com/spillway-ml/spillway/internal/testkit/ownworld"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv("SPILLWAY_TEST_WRITER"); dir != "" {
		writeForever(dir)
	}
	os.Exit(ownworld.Run(m)) // without stored measurements, which would change plans
}

// writeForever is the job to be killed: it prints a line once it writes.
func writeForever(dir string) {
	f, err := Open(dir, small())
	if err == nil {
		var file *File
		if file, err = f.create(0, 1<<20, 0, 0); err == nil {
			mem := make([]byte, 1<<20)
			for i := 0; err == nil; i++ {
				fillBytes(mem, byte(i))
				err = file.Store(mem, 0).Run()
				if i == 2 {
					fmt.Println("writing")
				}
			}
		}
	}
	fmt.Println(err)
	os.Exit(1)
}

func open(t *testing.T, dir string, o Options) *Folder {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("the disk tier is Linux's")
	}
	f, err := Open(dir, o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	return f
}

func create(t *testing.T, f *Folder, size int64, initial byte) *File {
	t.Helper()
	file, err := f.create(2, size, initial, f.opts.Cache)
	require.NoError(t, err)
	return file
}

// small returns options under which transfers have many pieces.
func small() Options { return Options{Block: 16 << 10, Depth: 3} }

func random(r *rand.Rand, n int64) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// aligned returns n bytes at an address that is a multiple of a page, plus shift.
func aligned(t *testing.T, n, shift int64) []byte {
	b, err := filesys.MapPages(roundUp(n+shift, Page))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, filesys.UnmapPages(b)) })
	return b[shift : shift+n : shift+n]
}

// In every mode a file behaves like a byte array filled with the initial byte.
func TestIsAnArrayOfBytes(t *testing.T) {
	modes := map[string]Options{"direct": small(), "buffered": small(), "named": small(), "s2": small(), "zstd": small(), "cache": small(), "s2 and cache": small()}
	for name, o := range modes {
		o.Buffered = name == "buffered"
		o.named = name == "named"
		switch name {
		case "s2":
			o.Codec = S2
		case "zstd":
			o.Codec = Zstd
		case "cache":
			o.Cache = 128 << 10
		case "s2 and cache":
			o.Codec, o.Cache = S2, 128<<10
		}
		t.Run(name, func(t *testing.T) {
			const size = 250_123
			f := create(t, open(t, t.TempDir(), o), size, 0xFF)
			seed := rand.Uint64()
			t.Logf("seed %d", seed)
			r := rand.New(rand.NewPCG(seed, 0))
			want := bytes.Repeat([]byte{0xFF}, size)
			mem := aligned(t, size, 0)
			for i := range 400 {
				off := r.Int64N(size)
				n := min(r.Int64N(60_000), size-off)
				if i%3 == 0 { // whole pages, as buffers are placed
					off = off / Page * Page
				}
				at := r.Int64N(size - n + 1)
				if i%2 == 0 {
					at = at / Page * Page
				}
				part := mem[at : at+n]
				switch r.IntN(5) {
				case 0, 1:
					copy(part, random(r, n))
					if r.IntN(2) == 0 {
						fillBytes(part, byte(i)) // compresses
					}
					require.NoError(t, f.Store(part, off).Run())
					copy(want[off:], part)
				case 2:
					require.NoError(t, f.Fill(off, n, byte(i)).Run())
					fillBytes(want[off:off+n], byte(i))
				default:
					fillBytes(part, 7)
					require.NoError(t, f.Load(part, off).Run())
					require.True(t, bytes.Equal(want[off:off+n], part), "step %d: bytes [%d, %d)", i, off, off+n)
				}
			}
			if f.cache != nil {
				require.Positive(t, f.cache.hits.Load())
			}
		})
	}
}

// Neighbouring buffers share granules. Several streams use them concurrently.
func TestNeighboursAtTheSameTime(t *testing.T) {
	for _, o := range []Options{small(), {Block: 16 << 10, Depth: 4, Codec: S2}, {Block: 16 << 10, Depth: 4, Cache: 1 << 20}} {
		f := create(t, open(t, t.TempDir(), o), 400_005, 0)
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Add(1)
			go func() {
				defer wg.Done()
				r := rand.New(rand.NewPCG(uint64(i), 1))
				off, n := int64(i)*49_999+13, int64(49_999)
				mem, back := make([]byte, n), make([]byte, n)
				out, in := f.Store(mem, off), f.Load(back, off)
				for range 15 {
					copy(mem, random(r, n))
					if err := errors.Join(out.Run(), in.Run()); err != nil {
						t.Errorf("buffer %d: %v", i, err)
						return
					}
					if !bytes.Equal(mem, back) {
						t.Errorf("buffer %d: other bytes came back", i)
						return
					}
				}
			}()
		}
		wg.Wait()
	}
}

func TestRangesOutsideAreRefused(t *testing.T) {
	f := create(t, open(t, t.TempDir(), small()), 10_000, 0)
	mem := make([]byte, 100)
	for _, off := range []int64{-1, 9_901, 1 << 62} {
		var e *Error
		require.ErrorAs(t, f.Store(mem, off).Run(), &e)
		require.ErrorContains(t, e, "the arena has 10000 bytes")
	}
	require.NoError(t, f.Store(mem, 9_900).Run())
	require.NoError(t, f.Load(nil, 10_000).Run())
	require.NoError(t, f.Close())
	require.ErrorIs(t, f.Load(mem, 0).Run(), os.ErrClosed)
}

func TestBadOptions(t *testing.T) {
	dir := t.TempDir()
	for _, o := range []Options{{Block: 5000, Depth: 1}, {Block: 2048, Depth: 1}, {Block: 128 << 20, Depth: 1}, {Block: 4096, Depth: -1}, {Block: 4096, Depth: 5000}, {Cache: -1}, {Codec: 9}} {
		_, err := Open(dir, o)
		require.ErrorContains(t, err, "disk tier: ", "%+v", o)
	}
	_, err := Open("", Options{})
	require.ErrorContains(t, err, "no folder")
	f := open(t, dir, small())
	for _, size := range []int64{0, -1, 1<<62 + 1} {
		_, err = f.Create(0, size, 0)
		require.ErrorContains(t, err, "bytes")
	}
}

// A flipped bit on the disk is found by the next read of its granule.
func TestCorruptionIsFound(t *testing.T) {
	for _, codec := range []Codec{None, S2, Zstd} {
		t.Run(codec.String(), func(t *testing.T) {
			o := small()
			o.Codec = codec
			f := create(t, open(t, t.TempDir(), o), 100_000, 0)
			r := rand.New(rand.NewPCG(3, 3))
			mem := random(r, 100_000)
			require.NoError(t, f.Store(mem, 0).Run())
			page := aligned(t, Page, 0)
			at := int64(49_152) // a multiple of a page and of a block
			_, err := f.file.ReadAt(page, at)
			require.NoError(t, err)
			was := page[77]
			page[77] ^= 1
			_, err = f.file.WriteAt(page, at)
			require.NoError(t, err)

			err = f.Load(mem, 0).Run()
			var e *Error
			var c *Corrupt
			require.ErrorAs(t, err, &e)
			require.ErrorAs(t, err, &c)
			require.Equal(t, at, e.Off)
			require.Equal(t, "read", e.Op)
			require.Contains(t, err.Error(), fmt.Sprintf("at byte %d of %s: checksum mismatch: expected CRC32C %08x, found %08x", at, f.name, c.Want, c.Got))
			require.ErrorAs(t, f.Store(mem[:10], at+5).Run(), &c, "a part of the granule is written: the rest must be read")
			require.NoError(t, f.Load(mem[:at], 0).Run(), "other granules are sound")

			page[77] = was
			_, err = f.file.WriteAt(page, at)
			require.NoError(t, err)
			require.NoError(t, f.Load(mem, 0).Run())
		})
	}
}

func TestInjectedFaults(t *testing.T) {
	for _, c := range []struct {
		plan fault.FilePlan
		err  error
		op   string
	}{
		{fault.FilePlan{Read: 2}, syscall.EIO, "read"},
		{fault.FilePlan{Write: 3}, syscall.EIO, "write"},
		{fault.FilePlan{Full: 4}, syscall.ENOSPC, "write"},
		{fault.FilePlan{Short: 2}, syscall.ENOSPC, "write"},
		{fault.FilePlan{Flip: 2}, nil, "read"},
	} {
		var wrapped *fault.FaultyFile
		o := small()
		o.Wrap = func(rank int, f RawFile) RawFile {
			require.Equal(t, 2, rank)
			wrapped = fault.WrapFile(f, c.plan)
			return wrapped
		}
		f := create(t, open(t, t.TempDir(), o), 100_000, 0)
		mem := random(rand.New(rand.NewPCG(5, 5)), 100_000)
		keep := bytes.Clone(mem)
		err := f.Store(mem, 0).Run()
		require.True(t, bytes.Equal(keep, mem))
		if err == nil {
			err = f.Load(mem, 0).Run()
		}
		require.True(t, wrapped.Fired())
		var e *Error
		require.ErrorAs(t, err, &e)
		require.Equal(t, c.op, e.Op)
		require.Equal(t, f.name, e.File)
		if c.err != nil {
			require.ErrorIs(t, err, c.err)
		} else {
			var bad *Corrupt
			require.ErrorAs(t, err, &bad)
		}
	}
}

// After a failed write the transfer starts no further writes. It can then run again.
func TestAFailureEndsTheTransfer(t *testing.T) {
	o := small()
	o.Depth = 1
	disk := &broken{bad: 1}
	o.Wrap = func(int, RawFile) RawFile { return disk }
	f := create(t, open(t, t.TempDir(), o), 160_000, 0)
	k := f.Store(make([]byte, 160_000), 0)
	var e *Error
	require.ErrorAs(t, k.Run(), &e)
	require.Equal(t, int64(16384), e.Off)
	require.Equal(t, 2, disk.writes)
	disk.bad = -1
	require.NoError(t, k.Run())
	require.Equal(t, 12, disk.writes)
}

// broken fails the write with number bad, counted from 0.
type broken struct{ writes, bad int }

func (*broken) ReadAt([]byte, int64) (int, error) { return 0, io.EOF }
func (b *broken) WriteAt(p []byte, _ int64) (int, error) {
	b.writes++
	if b.writes-1 == b.bad {
		return 0, syscall.EIO
	}
	return len(p), nil
}

func TestTrafficIsWhatWasAskedFor(t *testing.T) {
	f := create(t, open(t, t.TempDir(), small()), 100_000, 0)
	mem := make([]byte, 50_000)
	require.NoError(t, f.Load(mem, 100).Run())
	require.Equal(t, device.Traffic{}, f.Traffic(), "nothing was written, so nothing need be read")
	require.NoError(t, f.Store(mem, 100).Run())
	require.NoError(t, f.Load(mem[:30_000], 100).Run())
	require.Equal(t, device.Traffic{Read: 30_000, Written: 50_000}, f.Traffic())
}

// A cyclic pass over a file four times the cache's size: part of the file stays cached, and the
// cache serves the bytes last written.
func TestCacheServesAPartOfACircle(t *testing.T) {
	const block, blocks = 16 << 10, 128
	o := Options{Block: block, Depth: 2, Cache: blocks / 4 * block}
	f := create(t, open(t, t.TempDir(), o), block*blocks, 0)
	mem, back := aligned(t, block, 0), aligned(t, block, 0)
	for round := range 12 {
		for i := range int64(blocks) {
			if round > 0 {
				require.NoError(t, f.Load(back, i*block).Run())
				require.Equal(t, [2]byte{byte(round - 1), byte(i)}, [2]byte{back[0], back[block-1]}, "round %d, block %d", round, i)
			}
			fillBytes(mem, byte(round))
			mem[block-1] = byte(i)
			require.NoError(t, f.Store(mem, i*block).Run())
		}
	}
	hits, all := f.cache.hits.Load(), int64(11*blocks)
	require.Equal(t, (all-hits)*block, f.Traffic().Read)
	require.Equal(t, all/4, hits, "the cache's share of the file")
}

func TestOutsideBytes(t *testing.T) {
	require.Equal(t, int64(16<<20), OutsideBytes(Options{}))
	require.Equal(t, int64(2*4096+262_144*4+262_144/8), OutsideBytes(Options{Block: 4096, Depth: 2}, 1<<30))
}

func TestChoiceOfTheLeastMemoryNearTheBest(t *testing.T) {
	best := Sample{Block: 1 << 20, Depth: 32, Read: 2e9, Write: 2e9}
	near := Sample{Block: 1 << 20, Depth: 16, Read: 1.95e9, Write: 1.95e9}
	small := Sample{Block: 1 << 20, Depth: 4, Read: 3e9, Write: 1e9}
	require.Equal(t, near, choose([]Sample{small, best, near}))
	require.Equal(t, best, choose([]Sample{best, small}))
	require.Equal(t, near, choose([]Sample{{Block: 4096, Depth: 1}, near}))
}

func TestFolderIsLeftAsItWasFound(t *testing.T) {
	for _, named := range []bool{false, true} {
		root := t.TempDir()
		dir := filepath.Join(root, "a", "b")
		o := small()
		o.named = named
		f, err := Open(dir, o)
		require.NoError(t, err)
		file := create(t, f, 10_000, 0)
		require.NoError(t, file.Store([]byte("x"), 0).Run())
		entries, err := os.ReadDir(dir)
		require.NoError(t, err)
		require.Empty(t, entries, "the file has no name")
		require.NoError(t, f.Close())
		require.NoError(t, f.Close())
		require.NoDirExists(t, filepath.Join(root, "a"), "made here, removed here")

		require.NoError(t, os.MkdirAll(dir, 0o777))
		other := filepath.Join(dir, "mine")
		require.NoError(t, os.WriteFile(other, nil, 0o600))
		f, err = Open(dir, o)
		require.NoError(t, err)
		create(t, f, 10_000, 0)
		require.NoError(t, f.Close())
		require.FileExists(t, other)
	}
}
