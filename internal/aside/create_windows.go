package aside

import (
	"errors"
	"os"
	"path/filepath"
)

// File is a file beside the one whose place it is to take.
type File struct {
	*os.File
	path         string
	done, closed bool
}

// Create makes a file beside path, under a name that nobody can foresee.
// CloseAtomicallyReplace syncs it and gives it path's name; Cleanup removes it where
// that did not happen.
func Create(path string, _ os.FileMode) (*File, error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path))
	if err != nil {
		return nil, err
	}
	return &File{File: f, path: path}, nil
}

// CloseAtomicallyReplace puts the file in path's place.
func (f *File) CloseAtomicallyReplace() error {
	if err := f.Sync(); err != nil {
		return err
	}
	f.closed = true
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), f.path); err != nil {
		return err
	}
	f.done = true
	return nil
}

// Cleanup removes the file unless it has taken path's place.
func (f *File) Cleanup() error {
	if f.done {
		return nil
	}
	f.done = true
	var err error
	if !f.closed {
		err = f.Close()
	}
	return errors.Join(err, os.Remove(f.Name()))
}
