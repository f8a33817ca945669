package checkpoint

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strings"
	"unsafe"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// Blob is a small file of a checkpoint.
type Blob struct {
	Name string
	Data []byte
}

// NonFinite is the error for a state that is not saved because it holds non-finite values.
type NonFinite struct {
	State, Tensor string
	Count, Of     int64 // elements, of those that one rank checked
	First         int64 // index in the tensor of the first non-finite element
}

func (e *NonFinite) Error() string {
	return fmt.Sprintf("%s of %q: %d of %d values are not finite, first element %d; nothing is saved", e.State, e.Tensor, e.Count, e.Of, e.First)
}

// writeRest writes blobs and the manifest into a folder that already has its ranks' files,
// synced, and syncs all of it.
func writeRest(in filesys.Folder, m Manifest, parts []File, blobs []Blob) (Manifest, error) {
	m.Version, m.Files = Version, slices.Clone(parts)
	m.Tensors = slices.Clone(m.Tensors)
	slices.SortFunc(m.Tensors, func(a, b Tensor) int { return strings.Compare(a.Name, b.Name) })
	for _, b := range blobs {
		if err := writeSynced(in, b.Name, b.Data); err != nil {
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
	if err := writeSynced(in, manifestName, text); err != nil {
		return m, err
	}
	return m, in.Sync()
}

// Exponent bits of the numbers in eight bytes. A number whose exponent bits are all ones is
// infinite or not a number.
const (
	exponents32   = 0x7f800000_7f800000
	exponentsBF16 = 0x7f80_7f80_7f80_7f80
	exponentsF16  = 0x7c00_7c00_7c00_7c00
)

// finite tells whether all numbers of b are finite; exponents masks their exponent bits. Adding
// the lowest exponent bit to an all-ones exponent carries into the sign bit, which the mask has
// cleared, and no further.
func finite(b []byte, exponents uint64) bool {
	sign := exponents &^ (exponents >> 1) << 1 // of each number
	lowest := exponents &^ (exponents << 1)
	var w, x, y, z uint64
	for ; len(b) >= 32; b = b[32:] {
		w |= binary.NativeEndian.Uint64(b)&exponents + lowest
		x |= binary.NativeEndian.Uint64(b[8:])&exponents + lowest
		y |= binary.NativeEndian.Uint64(b[16:])&exponents + lowest
		z |= binary.NativeEndian.Uint64(b[24:])&exponents + lowest
	}
	for ; len(b) >= 8; b = b[8:] {
		w |= binary.NativeEndian.Uint64(b)&exponents + lowest
	}
	var last [8]byte
	copy(last[:], b)
	w |= binary.NativeEndian.Uint64(last[:])&exponents + lowest
	return (w|x|y|z)&sign == 0
}

// Look counts the non-finite values of v, the tensor's elements from start on.
func (e *NonFinite) Look(start int64, v []float32) {
	if len(v) == 0 || finite(unsafe.Slice((*byte)(unsafe.Pointer(&v[0])), 4*len(v)), exponents32) {
		return
	}
	const exponent = 0x7f800000
	for i, x := range v {
		if math.Float32bits(x)&exponent == exponent {
			if e.Count == 0 {
				e.First = start + int64(i)
			}
			e.Count++
		}
	}
}

func writeSynced(in filesys.Folder, name string, data []byte) error {
	return filesys.WriteSynced(in, name, data, 0o666)
}
