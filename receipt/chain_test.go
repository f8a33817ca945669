package receipt

import (
	"bytes"
	"crypto/sha256"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// hashes returns distinct hashes of the given number of ranges; seed selects the content.
func hashes(ranges int, seed string) []byte {
	var b []byte
	for i := range ranges {
		sum := sha256.Sum256([]byte{byte(i), seed[0]})
		b = append(b, sum[:]...)
	}
	return b
}

// written writes a receipt of three lines and returns its path.
func written(t testing.TB) string {
	path := filepath.Join(t.TempDir(), "new", "receipt")
	tensors := []Tensor{{"a", "model", "f32", RangeElems + 1}, {"b", "model", "f32", 3}}
	l, left, err := Continue(filesys.System, path, 0)
	require.NoError(t, err)
	require.Nil(t, left)
	for step := range 3 {
		r := Record{Step: step, Ranges: [][]byte{hashes(2, string(rune('a'+step))), hashes(1, "b")}}
		if r.Root = Root(tensors, r.Ranges); step == 0 {
			r.Run = &Run{Format: Format, Tensors: tensors}
		} else {
			r.Steps = []Step{{LR: 1e-3, Loss: Bits32(1.5), GradNorm: Bits64(2)}}
		}
		require.NoError(t, l.Append(r, true))
	}
	require.NoError(t, l.Close())
	return path
}

// TestChainsBreak checks that a changed byte breaks the chain at its line or the next one. A line
// that was cut off is ignored and replaced.
func TestChainsBreak(t *testing.T) {
	path := written(t)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	lines := bytes.SplitAfter(text, []byte("\n"))
	for i := 0; i < len(text); i += 7 {
		bad := bytes.Clone(text)
		bad[i] ^= 4
		require.NoError(t, os.WriteFile(path, bad, 0o644))
		c, err := Read(filesys.System, path)
		if err == nil {
			require.NoError(t, c.Close())
			err = c.Torn
			if err == nil { // the change is in the last line, so it changes the head
				require.Greater(t, i, len(text)-len(lines[2]))
				require.NotEqual(t, HashOf(lines[2]), c.Head())
				continue
			}
		}
		line := 1 + strings.Count(string(text[:i]), "\n")
		var broken *Broken
		if err == errCut {
			require.Equal(t, len(text)-1, i)
			continue
		}
		require.ErrorAs(t, err, &broken, "byte %d", i)
		require.ErrorIs(t, err, ErrDiffers)
		require.Contains(t, []int{line, line + 1}, broken.Line)
	}
	for _, name := range []string{"Step", "st`ps", "R00t"} { // in the last line, which no later hash covers
		at := bytes.LastIndex(text, []byte(map[string]string{"Step": "step\"", "st`ps": "steps", "R00t": "root"}[name]))
		bad := bytes.Clone(text)
		copy(bad[at:], name)
		require.NoError(t, os.WriteFile(path, bad, 0o644))
		c, err := Read(filesys.System, path)
		require.NoError(t, err)
		require.ErrorIs(t, c.Torn, ErrDiffers, name)
		require.NoError(t, c.Close())
	}
	require.NoError(t, os.WriteFile(path, text[:len(text)-5], 0o644))
	l, left, err := Continue(filesys.System, path, 1)
	require.NoError(t, err)
	require.Nil(t, left, "it never counted")
	require.Len(t, l.Lines, 2)
	require.NoError(t, l.Close())
	require.NoError(t, os.WriteFile(path, text, 0o644))
	l, left, err = Continue(filesys.System, path, 1)
	require.NoError(t, err)
	require.Equal(t, &Left{2, HashOf(lines[2])}, left)
	ranges, err := l.Ranges(1)
	require.NoError(t, err)
	require.Equal(t, hashes(2, "b"), ranges[0])
	require.NoError(t, l.Close())
	now, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(text), string(now), "until the next line is written")
}

// TestDiffer checks that Differ names the first range that differs and the number of further
// ranges.
func TestDiffer(t *testing.T) {
	tensors := []Tensor{{"a", "model", "f32", 2*RangeElems + 5}, {"b", "model", "f32", 3}}
	a := Hashed{tensors, [][]byte{hashes(3, "a"), hashes(1, "a")}}
	b := Hashed{tensors, [][]byte{hashes(3, "a"), hashes(1, "a")}}
	require.Nil(t, Differ(a, b))
	b.Ranges[0][2*Size] ^= 1
	b.Ranges[1][31] ^= 1
	p := Differ(a, b)
	require.Equal(t, &Place{tensors[0], 2 * RangeElems, 2*RangeElems + 5, 1}, p)
	require.Equal(t, `model of "a", elements 131072 to 131076, and 1 ranges more`, p.String())
}

// FuzzRead checks that no content of a receipt makes Read panic.
func FuzzRead(f *testing.F) {
	text, err := os.ReadFile(written(f))
	require.NoError(f, err)
	f.Add(text)
	f.Add([]byte(`{"prev":"","step":0,"run":{"format":1,"tensors":[{"elements":-1}]},"ranges":["AA=="]}` + "\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		path := filepath.Join(t.TempDir(), "r")
		require.NoError(t, os.WriteFile(path, text, 0o644))
		if c, err := Read(filesys.System, path); err == nil {
			for i := range c.Lines {
				_, _ = c.Ranges(i)
				_ = c.Run(i)
			}
			require.NoError(t, c.Close())
		}
	})
}
