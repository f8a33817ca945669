package checkpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// Open creates dir, locks it for this process and removes the leftovers of killed saves of this
// store under its temporary names. The error is a *Busy if another process has the folder open, and
// a *Foreign if another user has used it.
func Open(dir string, o Options) (*Store, error) {
	if o.Folders == nil {
		o.Folders = filesys.System
	}
	s := &Store{o: o, owner: random(), token: random(), long: longMarks}
	err := s.open(dir)
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *Store) open(dir string) (err error) {
	if s.f, s.made, err = filesys.MakeFolder(s.o.Folders, dir); err != nil {
		return err
	}
	if s.user, err = s.f.Owner(); err != nil {
		return err
	}
	if s.lock, err = s.takeLock(); err != nil {
		return err
	}
	if s.marks, err = readMarks(s.f, func(st filesys.Info) error { return s.own(marksName, st) }); err != nil {
		return err
	}
	if _, err := s.f.Lstat(marksName); err == nil {
		if err := s.openLog(); err != nil { // better to fail now than after the last step
			return err
		}
	}
	for _, name := range s.marks.working {
		if err := s.clear(name); err != nil {
			return fmt.Errorf("clear what a killed save left: %w", err)
		}
	}
	st, err := s.f.Info()
	if err != nil {
		return err
	}
	if open := st.Mode.Perm() & 0o022; open != 0 && st.Mode&fs.ModeSticky == 0 {
		who := "its group"
		if open&0o002 != 0 {
			who = "every user"
		}
		s.notes = append(s.notes, fmt.Sprintf("%s may rename and remove checkpoints in %s (mode %03o); "+
			"chmod go-w makes it yours alone, chmod +t keeps others from yours", who, s.f.Path(), st.Mode.Perm()))
	}
	return s.shorten()
}

// clear removes a temporary folder or file that a killed save left.
func (s *Store) clear(name string) error {
	st, err := s.f.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil && st.Owner != s.user {
		s.notes = append(s.notes, fmt.Sprintf("%s stays: it belongs to user %d, not to %d as what this process makes there",
			filepath.Join(s.f.Path(), name), st.Owner, s.user))
		return nil
	}
	if err == nil {
		err = filesys.RemoveAll(s.f, name)
	}
	return err
}

// Close releases the lock and the folder. A folder that Open made and nothing was written to is
// removed.
func (s *Store) Close() error {
	var errs []error
	if s.log != nil {
		errs = append(errs, s.log.Close())
		s.log = nil
	}
	if s.lock != nil {
		errs = append(errs, s.release(s.lock))
		s.lock = nil
	}
	if s.wrote {
		s.made.Stay()
	} else {
		s.made.Remove()
	}
	s.made = nil
	if s.f != nil {
		errs = append(errs, s.f.Close())
		s.f = nil
	}
	return errors.Join(errs...)
}
