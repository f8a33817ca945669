package checkpoint

import (
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// Blob is a small file of a checkpoint.
type Blob struct {
	Name string
	Data []byte
}

// NonFinite is a state that is not saved: it holds values that are not finite.
type NonFinite struct {
	State, Tensor string
	Count, Of     int64 // elements, of those that one rank looked at
	First         int64 // index in the tensor of the first of them
}

func (e *NonFinite) Error() string {
	return fmt.Sprintf("%s of %q: %d of %d values are not finite, first element %d; nothing is saved", e.State, e.Tensor, e.Count, e.Of, e.First)
}

// writeRest writes blobs and the manifest into a folder whose other files are there
// and synced, and syncs all of it.
func writeRest(folder string, m Manifest, parts []File, blobs []Blob) (Manifest, error) {
	m.Version, m.Files = Version, slices.Clone(parts)
	m.Tensors = slices.Clone(m.Tensors)
	slices.SortFunc(m.Tensors, func(a, b Tensor) int { return strings.Compare(a.Name, b.Name) })
	for _, b := range blobs {
		if err := writeSynced(filepath.Join(folder, b.Name), b.Data); err != nil {
			return m, err
		}
		m.Files = append(m.Files, File{Name: b.Name, Bytes: int64(len(b.Data)), CRC32C: sum(b.Data)})
	}
	if err := m.check(); err != nil {
		return m, err
	}
	text, err := m.text()
	if err != nil {
		return m, err
	}
	if len(text) > maxManifest {
		return m, fmt.Errorf("its manifest has %d bytes; at most %d are read again", len(text), maxManifest)
	}
	if err := writeSynced(filepath.Join(folder, manifestName), text); err != nil {
		return m, err
	}
	return m, filesys.SyncDir(folder)
}

// finite tells whether all of v is: a finite value times zero is zero, others times
// zero are not a number. Four sums, for each addition waits for the one before.
func finite(v []float32) bool {
	var a, b, c, d float32
	for ; len(v) >= 4; v = v[4:] {
		a += v[0] * 0
		b += v[1] * 0
		c += v[2] * 0
		d += v[3] * 0
	}
	for _, x := range v {
		a += x * 0
	}
	return a+b+c+d == 0
}

// Look counts the values of v, elements from start on, that are not finite.
func (e *NonFinite) Look(start int64, v []float32) {
	if finite(v) {
		return
	}
	const exponent = 0x7f800000 // all ones: infinite, or not a number
	for i, x := range v {
		if math.Float32bits(x)&exponent == exponent {
			if e.Count == 0 {
				e.First = start + int64(i)
			}
			e.Count++
		}
	}
}

func writeSynced(path string, data []byte) error { return filesys.WriteSynced(path, data, 0o666) }
