package checkpoint

import (
	"errors"
	"fmt"
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

// Path returns the folder's path for messages.
func (d Dir) Path() string { return d.f.Path() }

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

// removed returns the error for a checkpoint that was removed from its path.
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
