package checkpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/spillway-ml/spillway/internal/safetensors"
)

// Verify is Checkpoint.Verify of the checkpoint that a path names.
func Verify(ctx context.Context, folder string, only ...string) (Manifest, error) {
	c, err := OpenCheckpoint(folder)
	if err != nil {
		m, _ := ReadManifest(folder) // the manifest may be valid, but of another step than the folder's name
		return m, err
	}
	return c.Manifest, errors.Join(c.Verify(ctx, only...), c.Close())
}

// Verify compares a checkpoint with its manifest: it must have exactly the listed files, each
// with its size and CRC-32C, and the step in its name. Errors name the file and wrap
// ErrDamaged, except those of ctx. With names given, only those of the tensor files are read;
// for safetensors.FileName that is the headers of all ranks' files and the parameters in them.
// See AsLoaded. Other, small files are always compared, since loading a model reads any of
// them.
func (c *Checkpoint) Verify(ctx context.Context, only ...string) error {
	m := c.Manifest
	if err := c.exactly(); err != nil {
		return err
	}
	if m.Version >= sharded {
		if err := c.verifyParts(ctx, only); err != nil {
			return err
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
		if err := c.copy(ctx, want, io.Discard); err != nil {
			return err
		}
	}
	return nil
}

// Whole is Verify without the extents of ranks' files, which are compared when they are loaded.
func (c *Checkpoint) Whole(ctx context.Context) error { return c.Verify(ctx, headersAlone) }

// headersAlone is a name that no file has; Whole gives it to Verify.
const headersAlone = "/"

// AsLoaded is a name that no file has. Given to Verify, Choose or Take, it selects weights that are
// checked while they are loaded, so only their headers are read. Weights of versions 1 and 2, which
// loading does not check, are verified completely.
const AsLoaded = "/loaded"

// verifyParts reads the ranks' files: all extents, the parameters' only, or only headers.
func (c *Checkpoint) verifyParts(ctx context.Context, only []string) error {
	s, err := c.States()
	if err != nil {
		return err
	}
	if len(only) == 0 {
		return s.verify(ctx, "")
	}
	if slices.Contains(only, safetensors.FileName) {
		return s.verify(ctx, ModelState)
	}
	return nil
}

// verify compares the extents of one state, or for "" of all states, with their checksums.
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

// exactly compares the names in the folder with the manifest's. A listed file that is open
// counts as present even if its name was removed since.
func (c *Checkpoint) exactly() error {
	names, err := c.f.Names()
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // a folder that was removed has no names
		return faulty(err)
	}
	for _, f := range c.Manifest.Files {
		if errors.Is(c.files[f.Name].err, fs.ErrNotExist) {
			return fmt.Errorf("%w: %s is missing", ErrDamaged, filepath.Join(c.Folder, f.Name))
		}
	}
	for _, name := range names {
		if _, ok := c.Manifest.file(name); !ok && ours(name) {
			return fmt.Errorf("%w: %s is not in its manifest", ErrDamaged, filepath.Join(c.Folder, name))
		}
	}
	return nil
}

// ours tells whether a name is like those of a checkpoint's files. Other files, which a
// desktop, a network file system or a user leaves beside them, are ignored.
func ours(name string) bool {
	ext := filepath.Ext(name)
	return name[0] != '.' && name != manifestName && (ext == tensorsExt || ext == ".json")
}

// copy compares a file with its manifest entry while it writes its bytes to w.
func (c *Checkpoint) copy(ctx context.Context, want File, w io.Writer) error {
	path := filepath.Join(c.Folder, want.Name)
	file, err := c.file(want)
	if err != nil {
		return err
	}
	f := io.NewSectionReader(file, 0, want.Bytes)
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
