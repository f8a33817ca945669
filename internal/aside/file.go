package aside

import (
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
)

// TempName returns an unguessable name for a temporary file or folder. Its length does not depend on
// the final name, which may be as long as the filesystem allows.
func TempName() string { return ".spillway-" + rand.Text() }

// File is a temporary file that will replace another one in the same folder.
type File struct {
	*os.File
	path         string
	done, closed bool
}

// Create makes a temporary file in path's folder, with permissions perm less the umask.
func Create(path string, perm os.FileMode) (*File, error) {
	f, err := os.OpenFile(filepath.Join(filepath.Dir(path), TempName()), os.O_RDWR|os.O_CREATE|os.O_EXCL, perm)
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

// Cleanup closes and removes the file unless it was renamed.
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
