package checkpoint

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// Busy is the error for a folder that another process writes to.
type Busy struct {
	Dir    string
	Holder string // description of the holder in the lock file: process, host, start time
}

func (e *Busy) Error() string {
	return fmt.Sprintf("another run has %s open (%s); wait for it, or give another folder", e.Dir, e.Holder)
}

// Foreign is the error for a folder whose marks or lock file another user made. Their contents
// could make this process remove files.
type Foreign struct {
	Path        string
	Owner, Ours int64 // users' numbers
}

func (e *Foreign) Error() string {
	dir := filepath.Dir(e.Path)
	return fmt.Sprintf("%s belongs to user %d, and files that this process makes there belong to user %d: it removes nothing by what another user wrote; to go on from these checkpoints in a folder of your own, copy the newest (cp -r %s FOLDER/) and resume in FOLDER", e.Path, e.Owner, e.Ours, filepath.Join(dir, "step-N"))
}

// own refuses one of the store's own files if another user made it or it has a second name (a
// hard link).
func (s *Store) own(name string, st filesys.Info) error {
	path := filepath.Join(s.f.Path(), name)
	switch {
	case !st.Mode.IsRegular():
		return fmt.Errorf("%s is not a regular file", path)
	case st.Owner != s.user:
		return &Foreign{path, st.Owner, s.user}
	case st.Links > 1:
		return fmt.Errorf("%s has another name elsewhere (a hard link); remove it, or give another folder", path)
	}
	return nil
}

// takeLock locks the folder for this process until release. The kernel releases the lock
// however the process ends.
func (s *Store) takeLock() (filesys.File, error) {
	for {
		f, err := s.f.OpenFile(lockName, os.O_RDWR|os.O_CREATE|filesys.NoWait, 0o666)
		if errors.Is(err, os.ErrPermission) {
			if st, serr := s.f.Lstat(lockName); serr == nil {
				err = cmp.Or(s.own(lockName, st), err)
			}
		}
		if err != nil {
			return nil, err
		}
		ours, err := s.claim(f)
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		if ours {
			return f, nil
		}
		if err := f.Close(); err != nil {
			return nil, err
		}
	}
}

// claim locks f and checks that the lock file still has its name: the previous holder removes
// that while it holds the lock.
func (s *Store) claim(f filesys.File) (ours bool, err error) {
	st, err := f.Stat()
	if err != nil {
		return false, err
	}
	if !st.Mode.IsRegular() {
		return false, s.own(lockName, st)
	}
	got, err := tryLock(f)
	if err != nil {
		return false, err
	}
	if !got {
		return false, &Busy{s.f.Path(), holder(f)}
	}
	now, err := s.f.Lstat(lockName)
	if errors.Is(err, os.ErrNotExist) || err == nil && !filesys.Same(st, now) {
		return false, nil
	}
	if err == nil {
		err = s.own(lockName, st)
	}
	if err != nil {
		return false, err
	}
	host, _ := os.Hostname() // "" if the host has no name
	text := fmt.Sprintf("process %d on %s since %s\n%s\n", os.Getpid(), host, time.Now().UTC().Format(time.RFC3339), s.token)
	err = f.Truncate(0)
	if err == nil {
		_, err = f.WriteAt([]byte(text), 0)
	}
	return true, err
}

// stillOurs checks that the lock file still has its name. If somebody removed the name, the lock is
// taken again. If the folder is gone, a new one is created in its place, without the old marks.
func (s *Store) stillOurs() error {
	named, err := s.f.Lstat(lockName)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err == nil {
		if held, err := s.lock.Stat(); err != nil || filesys.Same(named, held) {
			return err
		}
	}
	again, err := s.takeLock()
	if errors.Is(err, fs.ErrNotExist) {
		return s.reopen()
	}
	if err != nil {
		return err
	}
	err = s.lock.Close() // its name is already removed
	s.lock, s.replaced = again, false
	return err
}

// reopen makes the removed folder again. If something now has its path, it must be an empty
// folder and no symlink: it may be another run's.
func (s *Store) reopen() error {
	path := s.f.Path()
	f, made, err := filesys.MakeFolder(s.o.Folders, path)
	if err != nil {
		return err
	}
	names, err := f.Names()
	if err == nil && (len(names) > 0 || f.Path() != path) {
		err = fmt.Errorf("%s was removed, and what is there now is not the folder that this run opened", path)
	}
	if err != nil {
		made.Remove()
		return errors.Join(err, f.Close())
	}
	was := s.f
	s.f = f
	again, err := s.takeLock()
	if err != nil {
		s.f = was
		made.Remove()
		return errors.Join(err, f.Close())
	}
	errs := []error{s.lock.Close(), was.Close()}
	if s.log != nil {
		errs = append(errs, s.log.Close())
	}
	s.made.Stay()
	s.lock, s.log, s.made, s.replaced = again, nil, made, false
	s.marks = parseMarks(filepath.Join(path, marksName), strings.NewReader(""))
	s.base.Store(nil)
	return errors.Join(errs...)
}

// holder reads who holds the lock.
func holder(f filesys.File) string {
	text, err := io.ReadAll(io.NewSectionReader(f, 0, 200))
	line, _, _ := strings.Cut(string(text), "\n")
	if err != nil || line == "" {
		return "it does not say which"
	}
	return fmt.Sprintf("%.80s", strings.Map(printable, line))
}

func printable(r rune) rune {
	if r < ' ' || r > '~' {
		return '?'
	}
	return r
}

// release removes the lock file's name if it is still ours, and releases the lock. A name that
// stays is harmless: an unlocked file blocks nobody.
func (s *Store) release(f filesys.File) error {
	if ours, err := f.Stat(); err == nil {
		if named, err := s.f.Lstat(lockName); err == nil && filesys.Same(ours, named) {
			_ = s.f.Remove(lockName)
		}
	}
	return f.Close()
}

// Held returns a *Busy if a process has the folder open for writing. It changes nothing.
func (d Dir) Held() error {
	if d.f == nil {
		return nil
	}
	f, err := d.f.OpenFile(lockName, os.O_RDWR|filesys.NoWait, 0)
	if errors.Is(err, os.ErrPermission) { // another user's file; a network file system may allow locks only with write access
		f, err = d.f.OpenFile(lockName, os.O_RDONLY|filesys.NoWait, 0)
	}
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	got, err := tryLock(f)
	if err == nil && !got {
		return &Busy{d.f.Path(), holder(f)}
	}
	return err
}

// tryLock locks an open file; it returns false if another process holds the lock.
func tryLock(f filesys.File) (bool, error) {
	got, err := f.TryLock()
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		return false, errors.New("checkpoint folders can't be locked on this system; two runs could write there at once")
	case err != nil:
		return false, fmt.Errorf("its filesystem gives no locks (flock: %w); two runs could write there at once", err)
	}
	return got, nil
}
