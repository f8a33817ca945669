package safetensors

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Names in a Hugging Face model folder.
const (
	FileName  = "model.safetensors"
	IndexName = "model.safetensors.index.json"
)

// Reader reads the tensors of one file, or of all files of a sharded index. Its methods may be
// called concurrently.
type Reader struct {
	path     string
	files    []source
	names    []string // their paths
	tensors  []Tensor
	places   map[string]place
	metadata map[string]string
}

// source is the open file of a Reader.
type source interface {
	io.ReaderAt
	io.Closer
}

type place struct {
	file    int
	entry   entry
	ordinal int // index in tensors
}

// WeightsOf returns the path of a model folder's weights, or of their index; "" if the folder has
// neither.
func WeightsOf(folder string) string {
	for _, name := range []string{FileName, IndexName} {
		path := filepath.Join(folder, name)
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	return ""
}

// Open opens a .safetensors file, a sharded index (a name ending in .json), or the
// model.safetensors or index of a model folder. It reads and checks every header, but no tensor
// data. Errors name the file and the tensor.
func Open(path string) (*Reader, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("open weights: %w", err)
	}
	if st.IsDir() {
		found := WeightsOf(path)
		if found == "" {
			return nil, fmt.Errorf("open weights: folder %s holds neither %s nor %s", path, FileName, IndexName)
		}
		path = found
	}
	r := &Reader{path: path, places: map[string]place{}}
	if strings.HasSuffix(path, ".json") {
		err = r.openIndex(path)
	} else {
		err = r.openFile(path, nil)
	}
	if err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

// OpenAs does the same as Open for one open file of size bytes; errors name it by path. The caller
// must still close it.
func OpenAs(path string, f io.ReaderAt, size int64) (*Reader, error) {
	r := &Reader{path: path, places: map[string]place{}}
	if err := r.add(path, struct {
		io.ReaderAt
		io.Closer
	}{f, io.NopCloser(nil)}, size, nil); err != nil {
		return nil, err
	}
	return r, nil
}

// openRegular checks the file type before opening: opening a pipe would wait for its writer.
func openRegular(path string) (*os.File, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("open weights: %w", err)
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("open weights: %s is not a regular file", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open weights: %w", err)
	}
	return f, nil
}

// openFile adds the tensors of the file at path: all if wanted is nil, otherwise those whose names
// it holds.
func (r *Reader) openFile(path string, wanted map[string]bool) error {
	f, err := openRegular(path)
	if err != nil {
		return err
	}
	st, err := f.Stat()
	if err != nil {
		return errors.Join(fmt.Errorf("open weights: %w", err), f.Close())
	}
	return r.add(path, f, st.Size(), wanted)
}

// add does the same as openFile for an open file.
func (r *Reader) add(path string, f source, size int64, wanted map[string]bool) error {
	r.files, r.names = append(r.files, f), append(r.names, path)
	entries, metadata, err := parseHeader(f, size)
	if err != nil {
		return fmt.Errorf("open weights %s: %w", path, err)
	}
	if r.metadata == nil {
		r.metadata = metadata
	}
	found := 0
	for _, e := range entries {
		if wanted != nil && !wanted[e.Name] {
			continue
		}
		found++
		r.places[e.Name] = place{file: len(r.files) - 1, entry: e, ordinal: len(r.tensors)}
		r.tensors = append(r.tensors, e.Tensor)
	}
	if found < len(wanted) {
		names := slices.Sorted(maps.Keys(wanted))
		missing := slices.IndexFunc(names, func(name string) bool { _, ok := r.places[name]; return !ok })
		return fmt.Errorf("open weights %s: the index %s says that it holds tensor %q, but it does not", path, r.path, names[missing])
	}
	return nil
}

func (r *Reader) openIndex(path string) error {
	f, err := openRegular(path)
	if err != nil {
		return err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxHeaderBytes+1))
	if err != nil {
		return fmt.Errorf("open weights %s: %w", path, err)
	}
	if len(text) > maxHeaderBytes {
		return fmt.Errorf("open weights %s: the index is over %d bytes", path, maxHeaderBytes)
	}
	var index struct {
		WeightMap map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(text, &index); err != nil {
		return fmt.Errorf("open weights %s: the index is not valid JSON with a weight_map of strings: %w", path, err)
	}
	if len(index.WeightMap) == 0 {
		return fmt.Errorf("open weights %s: the index has no weight_map, or an empty one", path)
	}
	byFile := map[string]map[string]bool{}
	for tensor, file := range index.WeightMap {
		if !filepath.IsLocal(file) {
			return fmt.Errorf("open weights %s: tensor %q is said to be in %q, which is not a file beside the index", path, tensor, file)
		}
		if byFile[file] == nil {
			byFile[file] = map[string]bool{}
		}
		byFile[file][tensor] = true
	}
	for _, file := range slices.Sorted(maps.Keys(byFile)) {
		shard := filepath.Join(filepath.Dir(path), file)
		if err := r.openFile(shard, byFile[file]); err != nil {
			if errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("open weights %s: shard %s is missing", path, shard)
			}
			return err
		}
	}
	return nil
}

// Path returns the path of the file or index that was opened.
func (r *Reader) Path() string { return r.path }

// Tensors lists all tensors: files by name, each in the order of its bytes.
func (r *Reader) Tensors() []Tensor {
	out := make([]Tensor, len(r.tensors))
	for i, t := range r.tensors {
		out[i] = t.clone()
	}
	return out
}

// Tensor returns the tensor with the given name.
func (r *Reader) Tensor(name string) (Tensor, bool) {
	p, ok := r.places[name]
	return p.entry.Tensor.clone(), ok
}

// Metadata returns __metadata__ of the file, for an index that of the first file. It is not a copy.
func (r *Reader) Metadata() map[string]string { return r.metadata }

// ReadFloat32 fills dst with elements [start, start+len(dst)) of a tensor of
// dtype F32, F16 or BF16, in row-major order. It allocates nothing and reads
// only these bytes. An unknown name, another dtype, a range outside of the
// tensor and a failed read are errors.
func (r *Reader) ReadFloat32(name string, start int64, dst []float32) error {
	p, ok := r.places[name]
	if !ok {
		return fmt.Errorf("read weights %s: there is no tensor %q", r.path, name)
	}
	f, e := r.files[p.file], &p.entry
	n := e.Elements()
	if start < 0 || start > n || int64(len(dst)) > n-start {
		return fmt.Errorf("read weights %s: tensor %q has %d elements; %d from %d are outside of it", r.names[p.file], name, n, len(dst), start)
	}
	if len(dst) == 0 {
		return nil
	}
	into := bytesOf(dst)
	switch e.DType {
	case F32:
	case F16, BF16:
		into = into[2*len(dst):]
	default:
		return fmt.Errorf("read weights %s: tensor %q is %s; it must be F32, F16 or BF16", r.names[p.file], name, e.DType)
	}
	if _, err := f.ReadAt(into, e.begin+start*sizes[e.DType]); err != nil {
		if errors.Is(err, io.EOF) {
			err = errors.New("the file became shorter since it was opened")
		}
		return fmt.Errorf("read weights %s: tensor %q: %w", r.names[p.file], name, err)
	}
	if e.DType == F32 {
		decode32(dst)
	} else {
		widen16(dst, e.DType)
	}
	return nil
}

// Close closes the files. No read may be in progress or follow.
func (r *Reader) Close() error {
	var errs []error
	for _, f := range r.files {
		errs = append(errs, f.Close())
	}
	r.files = nil
	return errors.Join(errs...)
}
