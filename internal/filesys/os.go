package filesys

import (
	"errors"
	"io/fs"
	"os"
)

// OS is the system's own file system.
var OS FS = system{}

type system struct{}

// file is an *os.File: one word, so that an interface holds it without another.
type file struct{ *os.File }

func (system) OpenFile(path string, flag int, perm fs.FileMode) (File, error) {
	f, err := os.OpenFile(path, flag, perm)
	if err != nil {
		return nil, err
	}
	return file{f}, nil
}

func (system) Mkdir(path string, perm fs.FileMode) error  { return os.Mkdir(path, perm) }
func (system) Remove(path string) error                   { return os.Remove(path) }
func (system) Rename(from, to string) error               { return os.Rename(from, to) }
func (system) RenameNew(from, to string) error            { return renameNew(from, to) }
func (system) ReadDir(path string) ([]fs.DirEntry, error) { return os.ReadDir(path) }
func (system) Stat(path string) (fs.FileInfo, error)      { return os.Stat(path) }
func (system) Lstat(path string) (fs.FileInfo, error)     { return os.Lstat(path) }

func (system) SyncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func (system) Room(path string) (Room, error) { return room(path) }

func (f file) Allocate(size int64) error { return allocate(f.File, size) }

func (f file) TryLock() (bool, error) { return tryLock(f.File) }
