//go:build !unix

package filesys

import (
	"errors"
	"io/fs"
	"os"
	"slices"
)

// Flags that exist only on other systems; they have no effect here.
const (
	NoWait = 0
	Direct = 0
)

// dir is a folder of the operating system's file system.
type dir struct {
	root *os.Root
	path string
}

func (system) Open(path string) (Folder, error) {
	r, err := os.OpenRoot(path)
	if err != nil {
		return nil, err
	}
	return &dir{r, path}, nil
}

func (d *dir) Path() string { return d.path }

func (d *dir) Info() (Info, error) {
	st, err := d.root.Stat(".")
	if err != nil {
		return Info{}, err
	}
	return infoOf(st), nil
}

func (d *dir) OpenFile(name string, flag int, perm fs.FileMode) (File, error) {
	if st, err := d.root.Lstat(name); err == nil && st.Mode()&fs.ModeSymlink != 0 {
		return nil, &fs.PathError{Op: "open", Path: join(d, name), Err: ErrLeads}
	}
	f, err := d.root.OpenFile(name, flag, perm)
	if err != nil {
		return nil, d.named(name, err)
	}
	return file{f}, nil
}

func (d *dir) Sub(name string) (Folder, error) {
	st, err := d.root.Lstat(name)
	if err == nil && st.Mode()&fs.ModeSymlink != 0 {
		return nil, &fs.PathError{Op: "open", Path: join(d, name), Err: ErrLeads}
	}
	r, err := d.root.OpenRoot(name)
	if err != nil {
		return nil, d.named(name, err)
	}
	return &dir{r, join(d, name)}, nil
}

// named adds the path of the file or folder to an error.
func (d *dir) named(name string, err error) error {
	var at *fs.PathError
	if errors.As(err, &at) {
		return &fs.PathError{Op: at.Op, Path: join(d, name), Err: at.Err}
	}
	return err
}

func (d *dir) Mkdir(name string, perm fs.FileMode) error {
	return d.named(name, d.root.Mkdir(name, perm))
}

func (d *dir) Remove(name string) error     { return d.named(name, d.root.Remove(name)) }
func (d *dir) Rename(from, to string) error { return d.root.Rename(from, to) }

// RenameNew renames a folder to a name that the caller found free.
func (d *dir) RenameNew(from, to string) error { return d.root.Rename(from, to) }

func (d *dir) Names() ([]string, error) {
	f, err := d.root.Open(".")
	if err != nil {
		return nil, d.named("", err)
	}
	names, err := f.Readdirnames(-1)
	slices.Sort(names)
	return names, errors.Join(err, f.Close())
}

func (d *dir) Lstat(name string) (Info, error) {
	st, err := d.root.Lstat(name)
	if err != nil {
		return Info{}, d.named(name, err)
	}
	return infoOf(st), nil
}

func (d *dir) Sync() error {
	f, err := d.root.Open(".")
	if err != nil {
		return d.named("", err)
	}
	return errors.Join(f.Sync(), f.Close())
}

func (d *dir) Room() (Room, error)   { return Room{}, errors.ErrUnsupported }
func (d *dir) Owner() (int64, error) { return NoOwner, nil }
func (d *dir) Close() error          { return d.root.Close() }

func infoOf(st fs.FileInfo) Info {
	return Info{Name: st.Name(), Size: st.Size(), Mode: st.Mode(), Owner: NoOwner, ID: ID{Of: st}}
}

type file struct{ *os.File }

func (f file) Stat() (Info, error) {
	st, err := f.File.Stat()
	if err != nil {
		return Info{}, err
	}
	return infoOf(st), nil
}

func (f file) Allocate(size int64) error { return f.Truncate(size) }

// TryLock locks a file that is open for this process alone: see File.TryLock.
func TryLock(*os.File) (bool, error) { return false, errors.ErrUnsupported }

func (f file) TryLock() (bool, error) { return false, errors.ErrUnsupported }
