package folders

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// Trouble is the kind of failure of an operation of a Fault.
type Trouble int

// The kinds of trouble. Full affects one operation: the first from Fault.At on that needs space.
// Short affects the first write from there.
const (
	Broken Trouble = iota // it fails with EIO and does nothing
	Full                  // it fails with ENOSPC and does nothing
	Short                 // a write writes half of what it was given and fails with ENOSPC
	Killed                // neither this operation nor any later one happens
)

// Troubles are all of them.
var Troubles = []Trouble{Broken, Full, Short, Killed}

func (t Trouble) String() string { return [...]string{"error", "full disk", "short write", "kill"}[t] }

// ErrKilled is the error of operations after the process was killed.
var ErrKilled = errors.New("the process was killed before this")

// Fault opens folders in which one operation fails. Operations are counted from 1. Every method
// call of the folders and their files counts, except Name, Path, Fd and a folder's Close.
type Fault struct {
	At      int     // the operation that fails; 0: none
	Trouble Trouble // how
	// Kill, if not nil, ends the process at a Killed operation. Without it all
	// operations from there on fail with ErrKilled and do nothing.
	Kill func()

	mu    sync.Mutex
	count int
	hit   string
	at    int // the operation that failed
}

// Folder wraps another folder, with the failures of the Fault.
func (f *Fault) Folder(in filesys.Folder) filesys.Folder { return &failing{in, f} }

// Count returns the number of operations so far.
func (f *Fault) Count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.count
}

// Hit returns a description of the operation that failed, or "" if none did.
func (f *Fault) Hit() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.hit
}

// Failed returns the number of the operation that failed, or 0 if none did.
func (f *Fault) Failed() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.at
}

// roomy lists the operations that need disk space.
var roomy = []string{"create", "mkdir", "rename", "write", "truncate", "allocate", "sync", "sync folder"}

// step counts an operation. If short is set, a write must be cut. If err is not nil, the operation
// must not happen.
func (f *Fault) step(op, path string) (short bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.count++
	if f.At == 0 || f.count < f.At {
		return false, nil
	}
	if f.hit != "" {
		if f.Trouble == Killed {
			return false, fail(op, path, ErrKilled)
		}
		return false, nil
	}
	switch f.Trouble {
	case Full:
		if !slices.Contains(roomy, op) {
			return false, nil
		}
		err = fail(op, path, syscall.ENOSPC)
	case Short:
		if op != "write" {
			return false, nil
		}
		short = true
	case Killed:
		if f.Kill != nil {
			f.Kill()
		}
		err = fail(op, path, ErrKilled)
	default:
		err = fail(op, path, syscall.EIO)
	}
	f.hit, f.at = fmt.Sprintf("%s %s", op, path), f.count
	return short, err
}

// failing is a folder opened through a Fault.
type failing struct {
	filesys.Folder
	f *Fault
}

// step counts an operation on a name.
func (d *failing) step(op, name string) error {
	_, err := d.f.step(op, filepath.Join(d.Path(), name))
	return err
}

// OpenFile opens a file whose operations count too.
func (d *failing) OpenFile(name string, flag int, perm fs.FileMode) (filesys.File, error) {
	op := "open"
	if flag&os.O_CREATE != 0 {
		op = "create"
	}
	if err := d.step(op, name); err != nil {
		return nil, err
	}
	inner, err := d.Folder.OpenFile(name, flag, perm)
	if err != nil {
		return nil, err
	}
	return &faulty{inner, d.f}, nil
}

func (d *failing) Sub(name string) (filesys.Folder, error) {
	if err := d.step("open folder", name); err != nil {
		return nil, err
	}
	inner, err := d.Folder.Sub(name)
	if err != nil {
		return nil, err
	}
	return &failing{inner, d.f}, nil
}

func (d *failing) Info() (filesys.Info, error) {
	if err := d.step("stat", ""); err != nil {
		return filesys.Info{}, err
	}
	return d.Folder.Info()
}

func (d *failing) Mkdir(name string, perm fs.FileMode) error {
	if err := d.step("mkdir", name); err != nil {
		return err
	}
	return d.Folder.Mkdir(name, perm)
}

func (d *failing) Remove(name string) error {
	if err := d.step("remove", name); err != nil {
		return err
	}
	return d.Folder.Remove(name)
}

func (d *failing) Rename(from, to string) error {
	if err := d.step("rename", from); err != nil {
		return err
	}
	return d.Folder.Rename(from, to)
}

func (d *failing) RenameNew(from, to string) error {
	if err := d.step("rename", from); err != nil {
		return err
	}
	return d.Folder.RenameNew(from, to)
}

func (d *failing) Names() ([]string, error) {
	if err := d.step("read folder", ""); err != nil {
		return nil, err
	}
	return d.Folder.Names()
}

func (d *failing) Lstat(name string) (filesys.Info, error) {
	if err := d.step("stat", name); err != nil {
		return filesys.Info{}, err
	}
	return d.Folder.Lstat(name)
}

func (d *failing) Sync() error {
	if err := d.step("sync folder", ""); err != nil {
		return err
	}
	return d.Folder.Sync()
}

func (d *failing) Owner() (int64, error) {
	if err := d.step("create", ""); err != nil {
		return filesys.NoOwner, err
	}
	return d.Folder.Owner()
}

// faulty is a file opened through a Fault.
type faulty struct {
	filesys.File
	f *Fault
}

func (f *faulty) Read(p []byte) (int, error) {
	if _, err := f.f.step("read", f.Name()); err != nil {
		return 0, err
	}
	return f.File.Read(p)
}

func (f *faulty) ReadAt(p []byte, off int64) (int, error) {
	if _, err := f.f.step("read", f.Name()); err != nil {
		return 0, err
	}
	return f.File.ReadAt(p, off)
}

func (f *faulty) Write(p []byte) (int, error) {
	return f.write(p, f.File.Write)
}

func (f *faulty) WriteAt(p []byte, off int64) (int, error) {
	return f.write(p, func(p []byte) (int, error) { return f.File.WriteAt(p, off) })
}

func (f *faulty) write(p []byte, inner func([]byte) (int, error)) (int, error) {
	short, err := f.f.step("write", f.Name())
	switch {
	case err != nil:
		return 0, err
	case !short:
		return inner(p)
	}
	n, err := inner(p[:len(p)/2])
	if err == nil {
		err = fail("write", f.Name(), syscall.ENOSPC)
	}
	return n, err
}

func (f *faulty) Stat() (filesys.Info, error) {
	if _, err := f.f.step("stat", f.Name()); err != nil {
		return filesys.Info{}, err
	}
	return f.File.Stat()
}

func (f *faulty) Truncate(size int64) error {
	if _, err := f.f.step("truncate", f.Name()); err != nil {
		return err
	}
	return f.File.Truncate(size)
}

func (f *faulty) Allocate(size int64) error {
	if _, err := f.f.step("allocate", f.Name()); err != nil {
		return err
	}
	return f.File.Allocate(size)
}

func (f *faulty) Sync() error {
	if _, err := f.f.step("sync", f.Name()); err != nil {
		return err
	}
	return f.File.Sync()
}

func (f *faulty) TryLock() (bool, error) {
	if _, err := f.f.step("lock", f.Name()); err != nil {
		return false, err
	}
	return f.File.TryLock()
}

// Close closes the file even if it returns an error, as the system does.
func (f *faulty) Close() error {
	_, err := f.f.step("close", f.Name())
	return errors.Join(err, f.File.Close())
}
