package aside

import (
	"errors"
	"os"
	"path/filepath"
)

// File is a temporary file that is to replace another in the same folder.
type File struct {
	*os.File
	path         string
	done, closed bool
}

// Create makes a temporary file beside path under an unguessable name. CloseAtomicallyReplace
// syncs it and renames it to path; Cleanup removes it unless that was done.
func Create(path string, _ os.FileMode) (*File, error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path))
	if err != nil {
		return nil, err
	}
	return &File{File: f, path: path}, nil
}

// CloseAtomicallyReplace syncs and closes the file and renames it to the path given to Create.
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

// Cleanup removes the file unless it was renamed.
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
