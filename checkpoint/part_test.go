package checkpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/safetensors"
)

// TestAPartThatCantBeWrittenIsNamedOnce checks that the error of a failed write contains the path
// once.
func TestAPartThatCantBeWrittenIsNamedOnce(t *testing.T) {
	_, parts := content([]float32{1, 2}, []float32{3, 4})
	gone := filepath.Join(t.TempDir(), "gone")
	require.NoError(t, os.Mkdir(gone, 0o755))
	f := at(t, gone)
	require.NoError(t, os.Remove(gone))
	_, err := WritePart(background, f, parts[0])
	require.ErrorIs(t, err, os.ErrNotExist)
	require.Equal(t, 1, strings.Count(err.Error(), gone), err)
}

// at opens a folder of the system.
func at(t require.TestingT, path string) filesys.Folder {
	f, err := filesys.Open(path)
	require.NoError(t, err)
	return f
}

// openStates opens the states of the checkpoint at path.
func openStates(path string) (*States, error) {
	c, err := OpenCheckpoint(path)
	if err != nil {
		return nil, err
	}
	return c.States()
}

// value returns the value of element i of a tensor's state in these tests.
func value(state, tensor string, i int64) float32 {
	return float32(len(state)*1000+len(tensor)*100) + float32(i%4099)
}

// world returns tensors of the given lengths and the parts of the ranks; cut chooses the length of
// each extent.
func world(ranks int, lengths []int64, cut func(n int64) int64) ([]Tensor, []*Part) {
	var tensors []Tensor
	parts := make([]*Part, ranks)
	for i := range parts {
		parts[i] = &Part{Index: i, Of: ranks}
	}
	at := 0
	for i, n := range lengths {
		name := fmt.Sprintf("t%02d", i)
		tensors = append(tensors, Tensor{Name: name, Shape: []int64{n}, States: []string{"model", "exp_avg"}})
		for _, state := range []string{"model", "exp_avg"} {
			for start := int64(0); start < n; {
				k := min(cut(n-start), n-start, ExtentBytes/4)
				p := parts[at%ranks]
				p.Extents = append(p.Extents, Extent{state, name, start, k, safetensors.F32})
				start += k
				at++
			}
		}
	}
	for _, p := range parts {
		p.Read = func(i int, off int64, dst []byte) error {
			e := p.Extents[i]
			v := unsafe.Slice((*float32)(unsafe.Pointer(&dst[0])), len(dst)/4)
			for k := range v {
				v[k] = value(e.State, e.Tensor, e.Start+off/4+int64(k))
			}
			return nil
		}
	}
	return tensors, parts
}

// TestLoadWhatRanksWrote saves random tensors from random parts and loads random ranges. Each
// wanted element must arrive once, in order and in blocks. Data larger than the buffers and reads
// that bypass the page cache are included. A staged part must equal the file written directly.
func TestLoadWhatRanksWrote(t *testing.T) {
	top := t.TempDir()
	round := 0
	rapid.Check(t, func(t *rapid.T) {
		round++
		dir := filepath.Join(top, fmt.Sprint(round))
		s, err := Open(dir, Options{})
		require.NoError(t, err)
		defer func() { require.NoError(t, os.RemoveAll(dir)) }()
		lengths := rapid.SliceOfN(rapid.SampledFrom([]int64{1, 7, 300, 4096}), 1, 5).Draw(t, "lengths")
		tensors, parts := world(rapid.IntRange(1, 4).Draw(t, "ranks"), lengths, func(n int64) int64 { return rapid.Int64Range(1+n/8, n).Draw(t, "cut") })
		folder, err := s.Save(background, Manifest{Step: 1, Tensors: tensors}, parts, nil)
		require.NoError(t, err)
		_, err = Verify(background, folder)
		require.NoError(t, err)

		staged := filepath.Join(dir, "staged")
		require.NoError(t, os.Mkdir(staged, 0o755))
		var image Image
		for _, p := range parts {
			require.NoError(t, image.Stage(p))
			f, err := image.Write(background, at(t, staged))
			require.NoError(t, err)
			a, err := os.ReadFile(filepath.Join(folder, f.Name))
			require.NoError(t, err)
			b, err := os.ReadFile(filepath.Join(staged, f.Name))
			require.NoError(t, err)
			require.True(t, bytes.Equal(a, b), f.Name)
		}
		require.NoError(t, image.Close())

		var wants []Want
		seen := map[Want]bool{} // per element
		for range rapid.IntRange(1, 6).Draw(t, "wants") {
			i := rapid.IntRange(0, len(lengths)-1).Draw(t, "tensor")
			start := rapid.Int64Range(0, lengths[i]-1).Draw(t, "start")
			w := Want{rapid.SampledFrom([]string{"model", "exp_avg"}).Draw(t, "state"), tensors[i].Name, start, rapid.Int64Range(1, lengths[i]-start).Draw(t, "n")}
			wants = append(wants, w)
			for k := range w.N {
				seen[Want{w.State, w.Tensor, w.Start + k, 1}] = true
			}
		}
		err = loadAt(background, folder, wants, Loading{Sink: func(state, tensor string, start int64, v []float32) error {
			for i, x := range v {
				k := Want{state, tensor, start + int64(i), 1}
				if !seen[k] || x != value(state, tensor, start+int64(i)) {
					return fmt.Errorf("%v: %v, wanted %v", k, x, seen[k])
				}
				delete(seen, k)
			}
			return nil
		}})
		require.NoError(t, err)
		require.Empty(t, seen)
		require.NoError(t, s.Close())
	})
}

// TestLargeParts saves and loads files of several buffers, which bypass the page cache where the
// system allows it.
func TestLargeParts(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	lengths := []int64{5, 3<<20 + 11, 9}
	tensors, parts := world(2, lengths, func(n int64) int64 { return n })
	parts[1].Buffer = LeastBuffer + 4777 // not a multiple of the block size
	folder, err := s.Save(background, Manifest{Step: 1, Tensors: tensors}, parts, nil)
	require.NoError(t, err)
	m, err := Verify(background, folder)
	require.NoError(t, err)
	require.Greater(t, m.Files[0].Bytes, int64(filesys.DirectBytes))
	require.Greater(t, m.Files[1].Bytes, int64(filesys.DirectBytes))
	path := filepath.Join(folder, m.Files[0].Name)
	flip(t, path, -5)
	_, err = Verify(background, folder, headersAlone)
	require.NoError(t, err, "headers alone are read")
	_, err = Verify(background, folder)
	require.ErrorIs(t, err, ErrDamaged)
	require.ErrorContains(t, err, path)
	var wants []Want
	for i, n := range lengths {
		wants = append(wants, Want{"model", tensors[i].Name, 0, n}, Want{"exp_avg", tensors[i].Name, 0, n})
	}
	count := int64(0)
	how := Loading{Sink: func(_, _ string, _ int64, v []float32) error { count += int64(len(v)); return nil }}
	err = loadAt(background, folder, wants, how)
	require.ErrorIs(t, err, ErrDamaged)
	require.ErrorContains(t, err, path)
	flip(t, path, -5)
	count = 0
	require.NoError(t, loadAt(background, folder, wants, how))
	require.Equal(t, 2*(lengths[0]+lengths[1]+lengths[2]), count)
	require.ErrorIs(t, loadAt(background, folder, []Want{{"model", "t00", 0, 6}}, how), ErrDamaged)
	require.ErrorIs(t, loadAt(background, folder, []Want{{"model", "other", 0, 1}}, how), ErrDamaged)
}

// TestNarrowStates checks states in 16 and 8 bits: their values, and the report of non-finite ones.
func TestNarrowStates(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	const n = 600 // 3 blocks
	tensors := []Tensor{{Name: "w", Shape: []int64{n}, States: []string{"exp_avg", "model"}}}
	p := &Part{Of: 1, Extents: []Extent{{"exp_avg.scale", "w", 0, 3, safetensors.F32}, {"model", "w", 0, n, safetensors.BF16}, {"exp_avg", "w", 0, 512, scaledDType}, {"exp_avg", "w", 512, 88, scaledDType}}}
	bad := false
	p.Read = func(i int, off int64, dst []byte) error {
		for k := range dst {
			at := off + int64(k)
			switch i {
			case 0:
				dst[k] = []byte{0, 0, 0x80, 0x3f}[at%4] // 1
			case 1:
				dst[k] = []byte{0, 0x40}[at%2] // 2
				if bad && at >= 100 {
					dst[k] = []byte{0x80, 0x7f}[at%2] // infinite
				}
			default:
				dst[k] = byte(p.Extents[i].Start + at)
			}
		}
		return nil
	}
	folder, err := s.Save(background, Manifest{Step: 1, Tensors: tensors}, []*Part{p}, nil)
	require.NoError(t, err)
	var got []float32
	how := Loading{Sink: func(_, _ string, _ int64, v []float32) error { got = append(got, v...); return nil }}
	require.ErrorContains(t, loadAt(background, folder, []Want{{"exp_avg", "w", 0, n}}, how), "in 8 bits")
	how.Dequantize = func(_ string, dst []float32, codes []byte, scale float32) error {
		for i, c := range codes {
			dst[i] = float32(c) * scale
		}
		return nil
	}
	require.NoError(t, loadAt(background, folder, []Want{{"exp_avg", "w", 256, n - 256}, {"model", "w", 7, 2}}, how))
	require.Len(t, got, n-256+2)
	require.Equal(t, float32(1), got[1])
	require.Equal(t, float32((n-1)%256), got[n-257])
	require.Equal(t, []float32{2, 2}, got[n-256:])
	r, err := openState(folder, "exp_avg")
	require.NoError(t, err)
	require.ErrorContains(t, r.ReadFloat32("w", 0, make([]float32, 1)), "in 8 bits")
	require.NoError(t, r.Close())

	bad = true
	_, err = s.Save(background, Manifest{Step: 2, Tensors: tensors}, []*Part{p}, nil)
	var odd *NonFinite
	require.ErrorAs(t, err, &odd)
	require.Equal(t, int64(50), odd.First)
	require.Equal(t, int64(n-50), odd.Count)
}

// TestPartsOfIllWill checks that headers with a valid checksum but invalid extents are rejected.
func TestPartsOfIllWill(t *testing.T) {
	good := []Extent{{"model", "w", 0, 2, safetensors.F32}, {"model", "w", 2, 1, safetensors.F32}}
	for what, change := range map[string]func([]Extent) []Extent{
		"a hole":          func(e []Extent) []Extent { e[1].Start = 3; return e },
		"an overlap":      func(e []Extent) []Extent { e[1].Start = 1; return e },
		"too short":       func(e []Extent) []Extent { return e[:1] },
		"too long":        func(e []Extent) []Extent { e[1].N = 2; return e },
		"another state":   func(e []Extent) []Extent { return append(e, Extent{"x", "w", 0, 1, safetensors.F32}) },
		"another tensor":  func(e []Extent) []Extent { return append(e, Extent{"model", "x", 0, 1, safetensors.F32}) },
		"two dtypes":      func(e []Extent) []Extent { e[1].DType = safetensors.BF16; return e },
		"8 bits unscaled": func(e []Extent) []Extent { return []Extent{{"model", "w", 0, 3, scaledDType}} },
		"none":            func(e []Extent) []Extent { return nil },
	} {
		s := open(t, t.TempDir(), Options{})
		p := &Part{Of: 1, Extents: change(append([]Extent(nil), good...)), Read: func(_ int, _ int64, dst []byte) error { clear(dst); return nil }}
		folder, err := s.Save(background, Manifest{Step: 1, Tensors: []Tensor{{Name: "w", Shape: []int64{3}, States: []string{"model"}}}}, []*Part{p}, nil)
		require.NoError(t, err, what)
		_, err = Verify(background, folder, headersAlone)
		require.ErrorIs(t, err, ErrDamaged, what)
	}
	for what, e := range map[string]Extent{
		"negative": {"model", "w", -1, 2, safetensors.F32}, "empty": {"model", "w", 0, 0, safetensors.F32}, "too large": {"model", "w", 0, ExtentBytes, safetensors.F32},
		"int64": {"model", "w", 0, 1, "I64"}, "overflow": {"model", "w", math.MaxInt64, 1, safetensors.F32}, "inside a block": {"exp_avg", "w", 3, 9, scaledDType},
		"a colon": {"mo:del", "w", 0, 1, safetensors.F32},
	} {
		_, err := WritePart(background, at(t, t.TempDir()), &Part{Of: 1, Extents: []Extent{e}})
		require.Error(t, err, what)
	}
}

// TestVersion2 checks version 2, which is version 1 with an owner: each file holds complete
// tensors.
func TestVersion2(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "step-00000007")
	require.NoError(t, os.CopyFS(dir, os.DirFS("testdata/v1/step-00000007")))
	m, err := ReadManifest(dir)
	require.NoError(t, err)
	m.Version, m.Owner, m.ID = 2, "a", "b"
	seal(t, dir, m)
	_, err = Verify(background, dir)
	require.NoError(t, err)
	require.Contains(t, m.States(), "exp_avg_sq")
	w, err := openState(dir, ModelState)
	require.NoError(t, err)
	tensor := w.Tensors()[0]
	want := make([]float32, tensor.Elements())
	require.NoError(t, w.ReadFloat32(tensor.Name, 0, want))
	require.NoError(t, w.Close())
	require.NoError(t, loadAt(background, dir, []Want{{"model", tensor.Name, 0, tensor.Elements()}}, Loading{Sink: func(_, _ string, start int64, v []float32) error {
		require.Equal(t, want[start:start+int64(len(v))], v)
		return nil
	}}))
	flip(t, filepath.Join(dir, "model.safetensors"), -1)
	_, err = Verify(background, dir, headersAlone)
	require.ErrorIs(t, err, ErrDamaged, "nothing else would read its sum")
}

// TestReshard rewrites a checkpoint for other numbers of ranks. States, name and marks must stay
// equal. A folder in use by a run and a damaged checkpoint are refused.
func TestReshard(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	tensors, parts := world(3, []int64{5, 700_001, 9}, func(n int64) int64 { return (n + 1) / 2 })
	folder, err := s.Save(background, Manifest{Step: 1, Tensors: tensors}, parts, []Blob{{"config.json", []byte("{}")}})
	require.NoError(t, err)
	require.NoError(t, s.Confirm())
	var busy *Busy
	require.ErrorAs(t, reshard(background, filesys.System, folder, 2), &busy)
	require.NoError(t, s.Close())
	read := func() map[string][]byte {
		_, err := Verify(background, folder)
		require.NoError(t, err)
		s, err := openStates(folder)
		require.NoError(t, err)
		all := map[string][]byte{}
		for _, t0 := range tensors {
			for _, state := range t0.States {
				all[state+t0.Name], err = s.Bytes(state, t0.Name)
				require.NoError(t, err)
			}
		}
		require.NoError(t, s.Close())
		return all
	}
	want := read()
	for _, ranks := range []int{1, 40, 2} {
		require.NoError(t, reshard(background, filesys.System, folder, ranks))
		require.Equal(t, []string{"step-00000001"}, names(t, dir))
		require.Equal(t, want, read())
		m, err := ReadManifest(folder)
		require.NoError(t, err)
		require.Equal(t, ranks, m.Ranks)
		require.Len(t, m.Files, ranks+1)
		marks, err := marksOf(dir)
		require.NoError(t, err)
		require.True(t, marks.Confirmed(m))
	}
	flip(t, filepath.Join(folder, "rank-00001-of-00002.safetensors"), -1)
	require.ErrorIs(t, reshard(background, filesys.System, folder, 3), ErrDamaged)
	require.ErrorContains(t, reshard(background, filesys.System, "testdata/v1/step-00000007", 2), "version 1")
}

func reshard(ctx context.Context, o filesys.Opener, path string, ranks int) error {
	_, _, err := Reshard(ctx, o, path, ranks)
	return err
}

func marksOf(dir string) (Marks, error) {
	d, err := OpenDir(filesys.System, dir)
	if err != nil {
		return Marks{}, err
	}
	m, err := d.Marks()
	return m, errors.Join(err, d.Close())
}

// openState opens one state of the checkpoint at path.
func openState(folder, name string) (Tensors, error) {
	c, err := OpenCheckpoint(folder)
	if err != nil {
		return nil, err
	}
	t, err := c.State(name)
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return closing{t, c}, nil
}

// closing wraps tensors so that closing them closes their checkpoint.
type closing struct {
	readable
	c *Checkpoint
}

type readable = Tensors

func (o closing) Close() error { return errors.Join(o.readable.Close(), o.c.Close()) }

func loadAt(ctx context.Context, folder string, wants []Want, how Loading) error {
	c, err := OpenCheckpoint(folder)
	if err != nil {
		return err
	}
	return errors.Join(c.Load(ctx, wants, how), c.Close())
}
