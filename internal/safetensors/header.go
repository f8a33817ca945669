package safetensors

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
)

const (
	// maxHeaderBytes is the limit of the reference implementation.
	maxHeaderBytes = 100_000_000
	// maxDims bounds a shape's length; published tensors have up to 5.
	maxDims     = 64
	metadataKey = "__metadata__"
)

// entry is a tensor and its place in the file.
type entry struct {
	Tensor
	begin, end int64 // bytes from the start of the file
}

// parseHeader reads the header of a file of size bytes and checks that its
// tensors tile the rest of the file. Entries come in the order of their bytes.
// It allocates in proportion to the header, which cannot exceed the file.
func parseHeader(r io.ReaderAt, size int64) ([]entry, map[string]string, error) {
	if size < 8 {
		return nil, nil, fmt.Errorf("the file has %d bytes; a safetensors file starts with 8 bytes of header length", size)
	}
	var prefix [8]byte
	if _, err := r.ReadAt(prefix[:], 0); err != nil {
		return nil, nil, fmt.Errorf("read the header's length: %w", err)
	}
	n := binary.LittleEndian.Uint64(prefix[:])
	if n > maxHeaderBytes {
		return nil, nil, fmt.Errorf("the header's length is %d; it must be at most %d (is this a safetensors file?)", n, maxHeaderBytes)
	}
	if int64(n) > size-8 {
		return nil, nil, fmt.Errorf("the header's length is %d, but only %d bytes follow it: the file is cut short", n, size-8)
	}
	text := make([]byte, n)
	if _, err := r.ReadAt(text, 8); err != nil {
		return nil, nil, fmt.Errorf("read the header: %w", err)
	}
	entries, metadata, err := decodeHeader(text)
	if err != nil {
		return nil, nil, err
	}
	dataStart := 8 + int64(n)
	if err := checkTiling(entries, size-dataStart); err != nil {
		return nil, nil, err
	}
	for i := range entries {
		entries[i].begin += dataStart
		entries[i].end += dataStart
	}
	return entries, metadata, nil
}

// decodeHeader walks the JSON by hand, since a map would accept a name twice.
func decodeHeader(text []byte) ([]entry, map[string]string, error) {
	dec := json.NewDecoder(bytes.NewReader(text))
	bad := func(err error) error {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return fmt.Errorf("the header is not valid JSON near byte %d: %w", 8+dec.InputOffset(), err)
	}
	tok, err := dec.Token()
	if err != nil {
		return nil, nil, bad(err)
	}
	if tok != json.Delim('{') {
		return nil, nil, errors.New("the header is not a JSON object")
	}
	var entries []entry
	var metadata map[string]string
	seen := map[string]bool{}
	for dec.More() {
		tok, err := dec.Token()
		if err != nil {
			return nil, nil, bad(err)
		}
		name := tok.(string) // the key of an object is always a string
		if seen[name] {
			return nil, nil, fmt.Errorf("tensor %q is in the header twice", name)
		}
		seen[name] = true
		if name == metadataKey {
			if err := dec.Decode(&metadata); err != nil {
				return nil, nil, fmt.Errorf("%s: %w; it must be an object of strings", metadataKey, err)
			}
			continue
		}
		var info struct {
			DType   *DType   `json:"dtype"`
			Shape   *[]int64 `json:"shape"`
			Offsets *[]int64 `json:"data_offsets"`
		}
		if err := dec.Decode(&info); err != nil {
			return nil, nil, fmt.Errorf("tensor %q: %w", name, err)
		}
		switch {
		case info.DType == nil:
			return nil, nil, fmt.Errorf("tensor %q has no dtype", name)
		case info.Shape == nil:
			return nil, nil, fmt.Errorf("tensor %q has no shape", name)
		case len(*info.Shape) > maxDims:
			return nil, nil, fmt.Errorf("tensor %q has %d dimensions; at most %d are taken", name, len(*info.Shape), maxDims)
		case info.Offsets == nil || len(*info.Offsets) != 2:
			return nil, nil, fmt.Errorf("tensor %q: data_offsets must be two numbers", name)
		}
		e := entry{Tensor: Tensor{Name: name, DType: *info.DType, Shape: *info.Shape}, begin: (*info.Offsets)[0], end: (*info.Offsets)[1]}
		if e.begin < 0 || e.end < e.begin {
			return nil, nil, fmt.Errorf("tensor %q: data_offsets [%d, %d] are not a range", name, e.begin, e.end)
		}
		want, err := e.byteSize()
		if err != nil {
			return nil, nil, fmt.Errorf("tensor %q: %w", name, err)
		}
		if e.end-e.begin != want {
			return nil, nil, fmt.Errorf("tensor %q: shape %v of %s takes %d bytes, but data_offsets [%d, %d] hold %d", name, e.Shape, e.DType, want, e.begin, e.end, e.end-e.begin)
		}
		entries = append(entries, e)
	}
	if _, err := dec.Token(); err != nil {
		return nil, nil, bad(err)
	}
	if rest := bytes.TrimSpace(text[dec.InputOffset():]); len(rest) > 0 {
		return nil, nil, fmt.Errorf("text follows the header's JSON at byte %d", 8+dec.InputOffset())
	}
	return entries, metadata, nil
}

// checkTiling sorts the entries by offset and checks that they cover [0, dataBytes) exactly
// once.
func checkTiling(entries []entry, dataBytes int64) error {
	slices.SortStableFunc(entries, func(a, b entry) int {
		return cmp.Or(cmp.Compare(a.begin, b.begin), cmp.Compare(a.end, b.end))
	})
	var at int64
	for i, e := range entries {
		switch {
		case e.begin < at:
			return fmt.Errorf("tensor %q overlaps tensor %q: it starts at byte %d of the data, the other ends at %d", e.Name, entries[i-1].Name, e.begin, at)
		case e.begin > at:
			return fmt.Errorf("tensor %q starts at byte %d of the data; bytes %d to %d belong to no tensor", e.Name, e.begin, at, e.begin)
		case e.end > dataBytes:
			return fmt.Errorf("tensor %q ends at byte %d of the data, which has %d: the file is cut short", e.Name, e.end, dataBytes)
		}
		at = e.end
	}
	if at != dataBytes {
		return fmt.Errorf("%d bytes follow the last tensor; the header is another file's, or the file was appended to", dataBytes-at)
	}
	return nil
}

// encodeHeader returns the file's first bytes, padded with spaces so that the data starts at a
// multiple of align.
func encodeHeader(entries []entry, metadata map[string]string, align int) ([]byte, error) {
	out := append(make([]byte, 8), '{')
	add := func(key string, value any) error {
		k, err := json.Marshal(key)
		if err != nil {
			return err
		}
		v, err := json.Marshal(value)
		if err != nil {
			return err
		}
		if len(out) > 9 {
			out = append(out, ',')
		}
		out = append(append(append(out, k...), ':'), v...)
		return nil
	}
	if len(metadata) > 0 {
		if err := add(metadataKey, metadata); err != nil {
			return nil, err
		}
	}
	for _, e := range entries {
		err := add(e.Name, struct {
			DType   DType    `json:"dtype"`
			Shape   []int64  `json:"shape"`
			Offsets [2]int64 `json:"data_offsets"`
		}{e.DType, append([]int64{}, e.Shape...), [2]int64{e.begin, e.end}})
		if err != nil {
			return nil, err
		}
	}
	out = append(out, '}')
	for len(out)%align != 0 {
		out = append(out, ' ')
	}
	if len(out)-8 > maxHeaderBytes {
		return nil, fmt.Errorf("%d tensors need a header of %d bytes; the format allows %d", len(entries), len(out)-8, maxHeaderBytes)
	}
	binary.LittleEndian.PutUint64(out, uint64(len(out)-8))
	return out, nil
}

// Layout is the position of the tensors in a file.
type Layout struct {
	Tensors  []Tensor // in the order of their bytes
	Begin    []int64  // byte of the file at which each begins
	Data     int64    // byte at which the first begins: the header's length
	Size     int64    // of the file, bytes
	Metadata map[string]string
}

// NewLayout lays tensors out in the given order and returns the file's first bytes, padded with
// spaces so that the data starts at a multiple of align, which must be a multiple of 8. The
// header's length depends only on the lengths of the metadata values. So values known only
// after the data is written can be filled in later.
func NewLayout(tensors []Tensor, metadata map[string]string, align int) (Layout, []byte, error) {
	l := Layout{Tensors: tensors, Metadata: metadata}
	entries := make([]entry, len(tensors))
	at := int64(0)
	for i, t := range tensors {
		n, err := t.byteSize()
		if err != nil {
			return l, nil, fmt.Errorf("tensor %.80q: %w", t.Name, err)
		}
		if at+n < at {
			return l, nil, errors.New("the tensors are over 2^63 bytes")
		}
		entries[i] = entry{t, at, at + n}
		l.Begin = append(l.Begin, at)
		at += n
	}
	header, err := encodeHeader(entries, metadata, align)
	if err != nil {
		return l, nil, err
	}
	l.Data = int64(len(header))
	for i := range l.Begin {
		l.Begin[i] += l.Data
	}
	l.Size = l.Data + at
	return l, header, nil
}

// ReadLayout reads and checks the header of a file of size bytes.
func ReadLayout(r io.ReaderAt, size int64) (Layout, error) {
	entries, metadata, err := parseHeader(r, size)
	if err != nil {
		return Layout{}, err
	}
	l := Layout{Data: size, Size: size, Metadata: metadata}
	for _, e := range entries {
		l.Tensors, l.Begin = append(l.Tensors, e.Tensor), append(l.Begin, e.begin)
	}
	if len(entries) > 0 {
		l.Data = entries[0].begin
	}
	return l, nil
}

// Size returns the bytes of an element; 0 for an unknown dtype.
func (d DType) Size() int64 { return sizes[d] }

// Decode converts the bytes of F32, F16 or BF16 elements to float32 values.
func Decode(dst []float32, src []byte, dtype DType) error {
	if int64(len(src)) != int64(len(dst))*dtype.Size() {
		return fmt.Errorf("%d bytes are not %d elements of %s", len(src), len(dst), dtype)
	}
	switch dtype {
	case F32:
		copy(bytesOf(dst), src)
		decode32(dst)
	case F16, BF16:
		copy(bytesOf(dst)[len(src):], src)
		widen16(dst, dtype)
	default:
		return fmt.Errorf("elements of %s are no numbers of 16 or 32 bits", dtype)
	}
	return nil
}
