package safetensors

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/spillway-ml/spillway/internal/aside"
)

// Writer writes one file. Create declares its tensors; their elements are written in ranges, in any
// order and from several goroutines; Commit gives the file its name. Until then there is only a
// temporary file in the same folder, so a killed writer leaves the old file unchanged.
type Writer struct {
	path   string
	f      target
	layout Layout
	index  map[string]int // of a tensor in layout

	mu      sync.Mutex
	written map[string][]span // sorted, disjoint, not touching
	err     error             // the first failed write: Commit repeats it
	done    bool
}

// target is the file that a Writer writes to.
type target interface {
	io.WriterAt
	Truncate(size int64) error
	finish() error // makes it durable, under its name, and closes it
	discard()
}

// replacing is a temporary file that is renamed to path at the end.
type replacing struct {
	*aside.File
	path string
}

func (f replacing) finish() error {
	if err := f.CloseAtomicallyReplace(); err != nil {
		return errors.Join(err, f.Cleanup())
	}
	// The rename is durable once the folder has been synced.
	dir, err := os.Open(filepath.Dir(f.path))
	if err == nil {
		err = errors.Join(dir.Sync(), dir.Close())
	}
	if err != nil {
		return fmt.Errorf("sync its folder: %w", err)
	}
	return nil
}

func (f replacing) discard() { _ = f.Cleanup() } // the caller could do nothing about an error

// Opened is an open file that already has its final name.
type Opened interface {
	io.WriterAt
	io.Closer
	Truncate(size int64) error
	Sync() error
}

type opened struct{ Opened }

func (f opened) finish() error { return errors.Join(f.Sync(), f.Close()) }
func (f opened) discard()      { _ = f.Close() } // the caller removes it with its folder

// span is elements [begin, end).
type span struct{ begin, end int64 }

// Create starts the file at path with the given tensors (F32 or BF16). Their bytes are laid out by
// element size, then name, as transformers does, which keeps every element aligned. Nil metadata
// means {"format": "pt"}, which transformers requires.
func Create(path string, tensors []Tensor, metadata map[string]string) (*Writer, error) {
	return create(path, tensors, metadata, func() (target, error) {
		f, err := aside.Create(path, 0o666)
		return replacing{f, path}, err
	})
}

// CreateAs does the same as Create for an open file; errors name it by path.
func CreateAs(path string, f Opened, tensors []Tensor, metadata map[string]string) (*Writer, error) {
	return create(path, tensors, metadata, func() (target, error) { return opened{f}, nil })
}

func create(path string, tensors []Tensor, metadata map[string]string, open func() (target, error)) (*Writer, error) {
	if metadata == nil {
		metadata = map[string]string{"format": "pt"}
	}
	list := make([]Tensor, 0, len(tensors))
	seen := map[string]bool{}
	for _, t := range tensors {
		switch {
		case t.Name == metadataKey:
			return nil, fmt.Errorf("write weights %s: no tensor may be called %s", path, metadataKey)
		case seen[t.Name]:
			return nil, fmt.Errorf("write weights %s: tensor %q is declared twice", path, t.Name)
		case t.DType != F32 && t.DType != BF16:
			return nil, fmt.Errorf("write weights %s: tensor %q is %q; it must be F32 or BF16", path, t.Name, t.DType)
		case len(t.Shape) > maxDims:
			return nil, fmt.Errorf("write weights %s: tensor %q has %d dimensions; at most %d are taken", path, t.Name, len(t.Shape), maxDims)
		}
		seen[t.Name] = true
		list = append(list, t.clone())
	}
	slices.SortFunc(list, func(a, b Tensor) int {
		return cmp.Or(cmp.Compare(sizes[b.DType], sizes[a.DType]), cmp.Compare(a.Name, b.Name))
	})
	layout, header, err := NewLayout(list, metadata, 8)
	if err != nil {
		return nil, fmt.Errorf("write weights %s: %w", path, err)
	}
	f, err := open()
	if err != nil {
		return nil, fmt.Errorf("write weights %s: %w", path, err)
	}
	w := &Writer{path: path, f: f, layout: layout, index: map[string]int{}, written: map[string][]span{}}
	for i, t := range list {
		w.index[t.Name] = i
	}
	_, err = w.f.WriteAt(header, 0)
	if err == nil {
		err = f.Truncate(layout.Size)
	}
	if err != nil {
		w.Abort()
		return nil, fmt.Errorf("write weights %s: %w", path, err)
	}
	return w, nil
}

// Tensors lists the tensors in the order of the file.
func (w *Writer) Tensors() []Tensor { return slices.Clone(w.layout.Tensors) }

// WriteFloat32 writes elements [start, start+len(src)) of a tensor, rounded to
// nearest even if it is BF16. An element may be written once.
func (w *Writer) WriteFloat32(name string, start int64, src []float32) error {
	i, ok := w.index[name]
	if !ok {
		return fmt.Errorf("write weights %s: tensor %q was not declared", w.path, name)
	}
	t := w.layout.Tensors[i]
	n := t.Elements()
	if start < 0 || start > n || int64(len(src)) > n-start {
		return fmt.Errorf("write weights %s: tensor %q has %d elements; %d from %d are outside of it", w.path, name, n, len(src), start)
	}
	if len(src) == 0 {
		return nil
	}
	if err := w.claim(name, span{start, start + int64(len(src))}); err != nil {
		return err
	}
	if err := w.writeAt(t.DType, w.layout.Begin[i]+sizes[t.DType]*start, src); err != nil {
		err = fmt.Errorf("write weights %s: tensor %q: %w", w.path, name, err)
		w.mu.Lock()
		defer w.mu.Unlock()
		w.err = cmp.Or(w.err, err)
		return err
	}
	return nil
}

// claim records that a range is being written.
func (w *Writer) claim(name string, s span) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.done {
		return fmt.Errorf("write weights %s: tensor %q: the file is already finished", w.path, name)
	}
	spans := w.written[name]
	// spans[i] is the first that ends after s begins.
	i, _ := slices.BinarySearchFunc(spans, s.begin+1, func(a span, end int64) int { return cmp.Compare(a.end, end) })
	if i < len(spans) && spans[i].begin < s.end {
		return fmt.Errorf("write weights %s: tensor %q: elements %d to %d were already written", w.path, name, max(s.begin, spans[i].begin), min(s.end, spans[i].end))
	}
	from, to := i, i // s replaces the spans that it touches
	if i > 0 && spans[i-1].end == s.begin {
		from, s.begin = i-1, spans[i-1].begin
	}
	if i < len(spans) && spans[i].begin == s.end {
		to, s.end = i+1, spans[i].end
	}
	w.written[name] = slices.Replace(spans, from, to, s)
	return nil
}

// chunks holds the rounded bytes of BF16 writes.
var chunks = sync.Pool{New: func() any { return new([1 << 16]byte) }}

func (w *Writer) writeAt(dtype DType, at int64, src []float32) error {
	if dtype == F32 && nativeLittle {
		_, err := w.f.WriteAt(bytesOf(src), at)
		return err
	}
	buf := chunks.Get().(*[1 << 16]byte)
	defer chunks.Put(buf)
	size := sizes[dtype]
	for len(src) > 0 {
		n := min(len(src), len(buf)/int(size))
		for i, x := range src[:n] {
			if dtype == F32 {
				binary.LittleEndian.PutUint32(buf[4*i:], math.Float32bits(x))
			} else {
				binary.LittleEndian.PutUint16(buf[2*i:], toBF16(x))
			}
		}
		if _, err := w.f.WriteAt(buf[:n*int(size)], at); err != nil {
			return err
		}
		at += int64(n) * size
		src = src[n:]
	}
	return nil
}

// Commit checks that every element was written, syncs the file and renames it into place. After
// an error the old file is unchanged and no other remains.
func (w *Writer) Commit() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.done {
		return fmt.Errorf("write weights %s: the file is already finished", w.path)
	}
	err := cmp.Or(w.err, w.firstGap())
	if err != nil {
		w.discard()
		return err
	}
	w.done = true
	if err := w.f.finish(); err != nil {
		return fmt.Errorf("write weights %s: %w", w.path, err)
	}
	return nil
}

// firstGap reports the first element, by name and index, that was not written.
func (w *Writer) firstGap() error {
	for _, name := range slices.Sorted(maps.Keys(w.index)) {
		n := w.layout.Tensors[w.index[name]].Elements()
		gap, spans := span{0, n}, w.written[name]
		if len(spans) > 0 && spans[0].begin == 0 {
			gap.begin, spans = spans[0].end, spans[1:]
		}
		if len(spans) > 0 {
			gap.end = spans[0].begin
		}
		if gap.begin < gap.end {
			return fmt.Errorf("write weights %s: tensor %q: elements %d to %d of %d were not written", w.path, name, gap.begin, gap.end, n)
		}
	}
	return nil
}

// Abort removes the temporary file. After Commit or Abort it does nothing.
func (w *Writer) Abort() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.discard()
}

func (w *Writer) discard() {
	if w.done {
		return
	}
	w.done = true
	w.f.discard()
}
