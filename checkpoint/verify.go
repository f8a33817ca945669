package checkpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"path/filepath"
	"slices"

	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/safetensors"
)

// Verify compares a checkpoint's folder with its manifest: exactly the files that
// it lists, each with its size and CRC-32C, and the step that its name says. Errors
// name the file and wrap ErrDamaged; those of ctx do not. With names given, of the files
// that hold tensors only those are read, of ranks' files the state that
// safetensors.FileName stands for and all headers; see AsLoaded. All others are compared
// whatever is given: they are small, and what reads a model reads any of them.
func Verify(ctx context.Context, folder string, only ...string) (Manifest, error) {
	m, err := ReadManifest(folder)
	if err != nil {
		return m, err
	}
	if e, _ := Stat(folder); e.Err != nil {
		return m, e.Err
	}
	if err := m.exactly(folder); err != nil {
		return m, err
	}
	if m.Version >= sharded {
		if err := verifyParts(ctx, folder, m, only); err != nil {
			return m, err
		}
	}
	if slices.Equal(only, []string{headersAlone}) {
		only = nil // the other files have no header with sums
	}
	if m.Version < sharded && slices.Contains(only, AsLoaded) {
		only = append(slices.Clone(only), safetensors.FileName)
	}
	for _, want := range m.Files {
		if want.Header > 0 || len(only) > 0 && filepath.Ext(want.Name) == tensorsExt && !slices.Contains(only, want.Name) {
			continue
		}
		if err := want.read(ctx, folder, io.Discard); err != nil {
			return m, err
		}
	}
	return m, nil
}

// Whole compares a checkpoint's folder with its manifest as Verify does, but for the
// extents of ranks' files, which are compared as they are loaded.
func Whole(ctx context.Context, folder string) (Manifest, error) {
	return Verify(ctx, folder, headersAlone)
}

// headersAlone is the name of no file: see Whole.
const headersAlone = "/"

// AsLoaded is the name of no file. Among those that Verify and Resolve take it stands
// for weights that are compared as they are loaded: only headers are read of them, but for
// versions 1 and 2, whose weights nothing else compares.
const AsLoaded = "/loaded"

// verifyParts reads the ranks' files: all of them, the parameters alone, or headers.
func verifyParts(ctx context.Context, folder string, m Manifest, only []string) error {
	s, err := openStates(folder, m)
	if err != nil {
		return err
	}
	if len(only) == 0 {
		err = s.verify(ctx, "")
	} else if slices.Contains(only, safetensors.FileName) {
		err = s.verify(ctx, ModelState)
	}
	return errors.Join(err, s.Close())
}

// verify compares the extents of one state with their checksums, or of all, "".
func (s *States) verify(ctx context.Context, only string) error {
	var all []*located
	for state, tensors := range s.extents {
		if only != "" && state != only {
			continue
		}
		for _, list := range tensors {
			for i := range list {
				all = append(all, &list[i])
			}
		}
	}
	slices.SortFunc(all, func(a, b *located) int { return cmp.Or(cmp.Compare(a.file, b.file), cmp.Compare(a.at, b.at)) })
	b := make([]byte, ExtentBytes)
	for _, e := range all {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := s.raw(e, b[:e.Bytes()]); err != nil {
			return err
		}
	}
	return nil
}

// exactly compares the names in a folder with the manifest's.
func (m *Manifest) exactly(folder string) error {
	entries, err := filesys.ReadDir(folder)
	if err != nil {
		return faulty(err)
	}
	found := map[string]bool{}
	for _, e := range entries {
		found[e.Name()] = true
	}
	for _, f := range m.Files {
		if !found[f.Name] {
			return fmt.Errorf("%w: %s is missing", ErrDamaged, filepath.Join(folder, f.Name))
		}
	}
	for _, e := range entries {
		if _, ok := m.file(e.Name()); !ok && ours(e.Name()) {
			return fmt.Errorf("%w: %s is not in its manifest", ErrDamaged, filepath.Join(folder, e.Name()))
		}
	}
	return nil
}

// tensorsExt is how names of files that hold tensors end.
const tensorsExt = ".safetensors"

// ours tells whether a name is one that a checkpoint's files have: what a desktop, a
// network file system or somebody leaves beside them harms nothing.
func ours(name string) bool {
	ext := filepath.Ext(name)
	return name[0] != '.' && name != manifestName && (ext == tensorsExt || ext == ".json")
}

// read compares a file with what the manifest says of it, and hands its bytes to w.
func (want File) read(ctx context.Context, folder string, w io.Writer) error {
	path := filepath.Join(folder, want.Name)
	f, err := want.opened(folder)
	if err != nil {
		return err
	}
	defer f.Close()
	h := crc32.New(castagnoli)
	buf := make([]byte, min(1<<20, want.Bytes))
	for n := int64(0); n < want.Bytes; {
		if err := ctx.Err(); err != nil {
			return err
		}
		k, err := f.Read(buf[:min(int64(len(buf)), want.Bytes-n)])
		_, _ = h.Write(buf[:k]) // a hash never fails
		if _, err := w.Write(buf[:k]); err != nil {
			return err
		}
		if n += int64(k); err != nil && !(errors.Is(err, io.EOF) && n == want.Bytes) {
			return fmt.Errorf("%w: %s: %w", ErrDamaged, path, err)
		}
	}
	if got := fmt.Sprintf("%08x", h.Sum32()); got != want.CRC32C {
		return fmt.Errorf("%w: %s has CRC-32C %s; the manifest says %s", ErrDamaged, path, got, want.CRC32C)
	}
	return nil
}
