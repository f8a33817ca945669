package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// Dir is a checkpoint folder open for reading. It is never written to or locked. The zero value
// is a folder that does not exist and has no checkpoints.
type Dir struct{ f filesys.Folder }

// OpenDir opens a checkpoint folder; one that is missing is the zero Dir.
func OpenDir(o filesys.Opener, path string) (Dir, error) {
	f, err := o.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return Dir{}, nil
	}
	if err != nil {
		return Dir{}, fmt.Errorf("list checkpoints: %w", err)
	}
	return Dir{f}, nil
}

// Close closes the folder. Checkpoints opened from it stay open.
func (d Dir) Close() error {
	if d.f == nil {
		return nil
	}
	return d.f.Close()
}

// Again opens the same folder again, even if another folder now has its path.
func (d Dir) Again() (filesys.Folder, error) { return d.f.Sub(".") }

// Path is the folder's path for messages.
func (d Dir) Path() string { return d.f.Path() }

// Checkpoint is an open checkpoint. All files that its manifest lists are opened with it, so
// they can be read even after their names are removed.
type Checkpoint struct {
	Entry
	f     filesys.Folder
	files map[string]opened
}

// opened is an open file, or the error of opening it.
type opened struct {
	filesys.File
	err error
}

// Open opens a checkpoint by its name. If its manifest can't be used the error is Entry.Err. It
// wraps fs.ErrNotExist if no checkpoint has that name.
func (d Dir) Open(name string) (*Checkpoint, error) {
	if d.f == nil {
		return nil, fmt.Errorf("open checkpoint %s: %w", name, fs.ErrNotExist)
	}
	f, err := d.f.Sub(name)
	if err != nil {
		return nil, fmt.Errorf("open checkpoint: %w", err)
	}
	return openIn(f, name, func() bool { return d.gone(name, f) },
		fmt.Errorf("open checkpoint %s: it was removed meanwhile: %w", f.Path(), fs.ErrNotExist))
}

// openIn opens a checkpoint in f, which it closes after an error. removed is the error if the
// checkpoint can't be opened whole because it is gone.
func openIn(f filesys.Folder, name string, gone func() bool, removed error) (*Checkpoint, error) {
	c, err := openCheckpoint(f, name)
	switch {
	case err == nil && (!c.lacks() || !gone()):
		return c, nil
	case err == nil:
		return nil, errors.Join(removed, c.Close())
	case gone():
		err = removed
	}
	return nil, errors.Join(err, f.Close())
}

// lacks tells whether a listed file was missing.
func (c *Checkpoint) lacks() bool {
	for _, o := range c.files {
		if errors.Is(o.err, fs.ErrNotExist) {
			return true
		}
	}
	return false
}

// gone tells whether a checkpoint's folder has lost its name because another process removes
// it.
func (d Dir) gone(name string, f filesys.Folder) bool {
	st, err := d.f.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return true
	}
	was, werr := f.Info()
	return err == nil && werr == nil && !filesys.Same(st, was)
}

// OpenCheckpoint opens the checkpoint that a path names.
func OpenCheckpoint(path string) (*Checkpoint, error) { return openPath(filesys.System, path) }

// openPath opens the checkpoint at a path. The error wraps fs.ErrNotExist if the path does not
// exist or was removed meanwhile.
func openPath(o filesys.Opener, path string) (*Checkpoint, error) {
	f, err := o.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, removed(path)
	}
	if err != nil {
		return nil, faulty(err)
	}
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return openIn(f, filepath.Base(abs), func() bool { return renamed(o, path, f) }, removed(path))
}

// removed is the error for a checkpoint that was removed from its path.
func removed(path string) error {
	return fmt.Errorf("open checkpoint %s: a run has removed it meanwhile; give %s, which stands for its newest whole checkpoint: %w",
		path, filepath.Dir(filepath.Clean(path)), fs.ErrNotExist)
}

// renamed tells whether an open folder has lost its path meanwhile.
func renamed(o filesys.Opener, path string, f filesys.Folder) bool {
	now, err := o.Open(path)
	if err != nil {
		return errors.Is(err, fs.ErrNotExist)
	}
	st, err := now.Info()
	was, werr := f.Info()
	return errors.Join(now.Close(), err, werr) == nil && !filesys.Same(st, was)
}

// missing is an error about a checkpoint's folder that can't be opened.
func missing(path string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %s is missing", ErrDamaged, filepath.Join(path, manifestName))
	}
	return faulty(err)
}

// openCheckpoint opens a checkpoint in f. It takes ownership of f unless it fails.
func openCheckpoint(f filesys.Folder, name string) (*Checkpoint, error) {
	c := &Checkpoint{Entry: Entry{Name: name, Folder: f.Path()}, f: f, files: map[string]opened{}}
	if c.Manifest, c.Err = readManifest(f); c.Err == nil {
		c.named()
	}
	if c.Err != nil {
		return nil, c.Err
	}
	for _, want := range c.Manifest.Files {
		var o opened
		o.File, o.err = filesys.OpenRegular(f, want.Name)
		c.files[want.Name] = o
	}
	return c, nil
}

// named fills in the fields that follow from the checkpoint's name, and compares the name with
// the manifest.
func (e *Entry) named() {
	var canonical bool
	if e.Step, e.Copy, canonical = parseName(e.Name); !canonical {
		e.Step, e.Copy = e.Manifest.Step, 1
	} else if e.Err == nil {
		e.Err = e.agrees()
	}
}

// Close closes the files.
func (c *Checkpoint) Close() error {
	errs := []error{c.f.Close()}
	for _, o := range c.files {
		if o.err == nil {
			errs = append(errs, o.Close())
		}
	}
	c.files = nil
	return errors.Join(errs...)
}

// file returns an open file after checking that it has the size in the manifest.
func (c *Checkpoint) file(want File) (filesys.File, error) {
	path := filepath.Join(c.Folder, want.Name)
	o := c.files[want.Name]
	if errors.Is(o.err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %s is missing", ErrDamaged, path)
	}
	if o.err != nil {
		return nil, faulty(o.err)
	}
	st, err := o.Stat()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	if st.Size != want.Bytes {
		return nil, fmt.Errorf("%w: %s has %d bytes; the manifest says %d", ErrDamaged, path, st.Size, want.Bytes)
	}
	return o, nil
}

// Read returns the contents of a small file of the checkpoint after comparing them with its
// checksum. The error is fs.ErrNotExist if the manifest lists no such file.
func (c *Checkpoint) Read(name string) ([]byte, error) {
	want, ok := c.Manifest.file(name)
	if !ok {
		return nil, fmt.Errorf("read %s: %w", filepath.Join(c.Folder, name), fs.ErrNotExist)
	}
	text, err := c.Bytes(want)
	if err != nil {
		return nil, err
	}
	if want.Header == 0 && sum(text) != want.CRC32C {
		return nil, fmt.Errorf("%w: %s has CRC-32C %s; the manifest says %s", ErrDamaged, filepath.Join(c.Folder, name), sum(text), want.CRC32C)
	}
	return text, nil
}

// Bytes returns a file's contents. Only its size is compared with the manifest.
func (c *Checkpoint) Bytes(want File) ([]byte, error) {
	f, err := c.file(want)
	if err != nil {
		return nil, err
	}
	text := make([]byte, want.Bytes)
	if _, err := io.ReadFull(io.NewSectionReader(f, 0, want.Bytes), text); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrDamaged, f.Name(), err)
	}
	return text, nil
}
