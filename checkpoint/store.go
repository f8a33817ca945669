package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// Options is how a run opens its checkpoint folder.
type Options struct {
	// Keep is how many confirmed checkpoints of this run are kept; 0: all.
	Keep int
	// Mark, where it is not empty, goes into every manifest, and checkpoints of
	// other runs that bear it are removed once this run's first one is complete. From
	// then on it stands for them: Manifest.Replaces.
	Mark string
}

// Store is a checkpoint folder that one process has open for one run. Its methods
// are for one goroutine at a time, but for Last, which may be asked at any time.
//
// A checkpoint is confirmed by the first update that is applied after it: only then
// is it known that training can go on from it. Prune counts confirmed ones alone,
// and keeps the newest beside them.
type Store struct {
	dir   string
	o     Options
	owner string // the run's id
	lock  filesys.File
	marks Marks
	log   filesys.File // of marks, appended to; nil before the first
	made  []string     // folders that Open made, outermost first
	wrote bool         // something that stays
	tidy  bool         // what Keep does not cover was removed once
	// replaced says that no other run's checkpoint bears the mark any more.
	replaced bool
	base     atomic.Pointer[Entry] // the checkpoint that the run wrote or went on from last
}

// Open makes dir, locks it for this process and clears what killed saves of this
// store left under its own temporary names. The error is a *Busy where another
// process has it.
func Open(dir string, o Options) (*Store, error) {
	s := &Store{dir: dir, o: o, owner: random()}
	err := s.open()
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *Store) open() (err error) {
	if s.made, err = filesys.MakeFolder(s.dir); err != nil {
		return err
	}
	if s.lock, err = lock(s.dir); err != nil {
		return err
	}
	if s.marks, err = ReadMarks(s.dir); err != nil {
		return err
	}
	if _, err := filesys.Lstat(filepath.Join(s.dir, marksName)); err == nil {
		if err := s.openLog(); err != nil { // better now than after the last step
			return err
		}
	}
	for _, name := range s.marks.working {
		if err := filesys.RemoveAll(filepath.Join(s.dir, name)); err != nil {
			return fmt.Errorf("clear what a killed save left: %w", err)
		}
	}
	return s.shorten()
}

// Close gives the folder back. One that Open made and nothing was written to goes.
func (s *Store) Close() error {
	var errs []error
	if s.log != nil {
		errs = append(errs, s.log.Close())
		s.log = nil
	}
	if s.lock != nil {
		errs = append(errs, release(s.lock))
		s.lock = nil
	}
	for i := len(s.made) - 1; i >= 0 && !s.wrote; i-- {
		if filesys.Remove(s.made[i]) != nil { // somebody put something there
			break
		}
	}
	s.made = nil
	return errors.Join(errs...)
}

// Owner is the id of the run.
func (s *Store) Owner() string { return s.owner }

// Damaged tells which of the folder's marks can't be read; nil: all can.
func (s *Store) Damaged() error { return s.marks.Damaged }

// Diverged lists what attempts in this folder ended in values that are not finite,
// oldest first.
func (s *Store) Diverged() []Divergence { return s.marks.Divergences }

// Continue makes the run go on from a checkpoint of the folder: as the same run,
// where the checkpoint names one. Newer checkpoints of it count no more.
func (s *Store) Continue(c Choice) error {
	if c.Manifest.Owner != "" {
		s.owner = c.Manifest.Owner
	}
	s.base.Store(&c.Entry)
	var left []string
	for _, p := range c.Passed {
		if p.Err == nil && p.Manifest.Owner == s.owner && !s.marks.left[p.Manifest.key()] {
			left = append(left, p.Manifest.key())
		}
	}
	if len(left) == 0 {
		return nil
	}
	return s.mark(mark{Event: markLeft, Keys: left})
}

// Last is the checkpoint that the run wrote or went on from last; nil: none.
func (s *Store) Last() *Entry { return s.base.Load() }

// Save writes a checkpoint of m.Step, all of whose parts are in this process, and
// returns its folder. The folder appears under its name complete and synced, or not
// at all; a name that is taken is never written over, the next one of the step is
// used. Values that are not finite are a *NonFinite.
func (s *Store) Save(ctx context.Context, m Manifest, parts []*Part, blobs []Blob) (string, error) {
	p, err := s.Begin(m)
	if err != nil {
		return "", err
	}
	var files []File
	for _, part := range parts {
		f, err := WritePart(ctx, p.Folder(), part)
		if err != nil {
			return "", p.Abort(err)
		}
		files = append(files, f)
	}
	e, err := p.Finish(files, blobs)
	if err != nil {
		return "", err
	}
	s.Adopt(e)
	return e.Folder, nil
}

// Pending is a checkpoint that is being written: its ranks' files go into Folder,
// from any process, then Finish gives it its name. Its methods may run beside those
// of the Store, for one goroutine.
type Pending struct {
	dir, temp string
	m         Manifest
}

// Begin starts a checkpoint of m.Step, with its Tensors, Run and what it says for
// information.
func (s *Store) Begin(m Manifest) (*Pending, error) {
	now := time.Now().UTC().Truncate(time.Second)
	m.ID, m.Owner, m.Mark, m.Written = random(), s.owner, s.o.Mark, &now
	others, err := s.others()
	if err != nil {
		return nil, fmt.Errorf("save checkpoint of step %d in %s: %w", m.Step, s.dir, err)
	}
	for _, e := range others {
		if !slices.Contains(m.Replaces, e.Manifest.Owner) {
			m.Replaces = append(m.Replaces, e.Manifest.Owner)
		}
	}
	return s.begin(m)
}

func (s *Store) begin(m Manifest) (*Pending, error) {
	p := &Pending{dir: s.dir, m: m}
	err := s.stillOurs()
	if err == nil {
		p.temp, err = s.working(tempPrefix + Name(m.Step, 1))
	}
	if err == nil {
		p.temp, err = filepath.Abs(p.temp) // other processes have other working folders
	}
	if err == nil {
		err = filesys.Mkdir(p.temp, 0o777)
	}
	if err != nil {
		return nil, p.failed(err)
	}
	return p, nil
}

func (p *Pending) failed(err error) error {
	return fmt.Errorf("save checkpoint of step %d in %s: %w", p.m.Step, p.dir, err)
}

// Folder is where the ranks' files are written, an absolute path.
func (p *Pending) Folder() string { return p.temp }

// Finish completes the checkpoint of the parts' files, makes it durable and gives it
// its name.
func (p *Pending) Finish(parts []File, blobs []Blob) (Entry, error) {
	m, err := writeRest(p.temp, p.m, parts, blobs)
	var e Entry
	if err == nil {
		e, err = commit(p.dir, p.temp, m)
	}
	if err != nil {
		return e, p.Abort(err)
	}
	return e, nil
}

// Abort removes what was written, because of err, and returns that as a failed
// save's.
func (p *Pending) Abort(err error) error {
	return p.failed(errors.Join(err, filesys.RemoveAll(p.temp)))
}

// Adopt makes a checkpoint that Finish completed the one that the run wrote last.
func (s *Store) Adopt(e Entry) {
	s.base.Store(&e)
	s.wrote = true
}

// stillOurs sees that the folder and its lock are what Open left. A folder that
// somebody removed is made and locked again, without what it remembered.
func (s *Store) stillOurs() error {
	made, err := filesys.MakeFolder(s.dir)
	if err != nil {
		return err
	}
	named, err := filesys.Stat(s.lock.Name())
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err == nil {
		if held, err := s.lock.Stat(); err != nil || filesys.SameFile(named, held) {
			return err
		}
	}
	again, err := lock(s.dir)
	if err != nil {
		return err
	}
	err = s.lock.Close() // its name is gone already
	s.lock, s.replaced = again, false
	if s.log != nil && len(made) > 0 {
		err = errors.Join(err, s.log.Close())
		s.log = nil
	}
	if len(made) > 0 {
		s.marks = parseMarks(filepath.Join(s.dir, marksName), nil)
		s.base.Store(nil)
	}
	return err
}

// commit gives a complete folder the first free name of its step.
func commit(dir, temp string, m Manifest) (Entry, error) {
	e := Entry{Step: m.Step, Copy: 1, Manifest: m}
	for ; ; e.Copy++ {
		e.Name = Name(e.Step, e.Copy)
		e.Folder = filepath.Join(dir, e.Name)
		_, err := filesys.Lstat(e.Folder)
		if errors.Is(err, os.ErrNotExist) {
			err = filesys.RenameNew(temp, e.Folder)
			if err == nil {
				return e, filesys.SyncDir(dir)
			}
		}
		if err != nil && !errors.Is(err, os.ErrExist) {
			return e, err
		}
	}
}

// working journals a temporary name before it is used, so that whoever opens the
// folder next knows what of a killed process is ours to remove.
func (s *Store) working(stem string) (path string, err error) {
	name := stem + "-" + random()
	return filepath.Join(s.dir, name), s.mark(mark{Event: markWorking, Name: name})
}

// Confirm records that an update was applied after the newest checkpoint, and
// removes what Options.Keep no longer covers: also, once, what a run left that was
// killed between the two. Without a new checkpoint it does nothing more.
func (s *Store) Confirm() error {
	base := s.Last()
	switch {
	case base == nil:
		return nil
	case !s.marks.Confirmed(base.Manifest):
		if err := s.mark(mark{Event: markConfirmed, Key: base.Manifest.key()}); err != nil {
			return err
		}
	case s.tidy:
		return nil
	}
	s.tidy = true
	return s.prune()
}

// MarkDivergence records that the run stopped at a step whose values are not
// finite. The newest checkpoint is passed over from now on if no update was applied
// after it.
func (s *Store) MarkDivergence(step int, settings map[string]string) error {
	v := mark{Event: markDiverged, Divergence: &Divergence{Step: step, Settings: settings}}
	if base := s.Last(); base != nil {
		v.Divergence.From = base.Name
		if !s.marks.Confirmed(base.Manifest) {
			v.Key = base.Manifest.key()
		}
	}
	return s.mark(v)
}

// mark records what must outlive a power loss.
func (s *Store) mark(v mark) error {
	err := s.append(v)
	if err == nil {
		err = s.log.Sync()
	}
	if err != nil {
		return fmt.Errorf("mark %s in %s: %w", v.Event, s.dir, err)
	}
	return nil
}

// append writes a line at the end of the marks' whole lines.
func (s *Store) append(v mark) error {
	line, err := v.line()
	if err != nil {
		return err
	}
	if s.log == nil {
		if err := s.openLog(); err != nil {
			return err
		}
	}
	if _, err := s.log.WriteAt(line, s.marks.whole); err != nil {
		return err
	}
	s.marks.whole += int64(len(line))
	s.marks.add(v)
	s.wrote = true
	return nil
}

func (s *Store) openLog() error {
	f, err := filesys.OpenFile(filepath.Join(s.dir, marksName), os.O_WRONLY|os.O_CREATE|filesys.NoFollow, 0o666)
	if err != nil {
		return err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", f.Name())
	}
	if err == nil && st.Size() > s.marks.whole {
		err = f.Truncate(s.marks.whole)
	}
	if err == nil {
		err = filesys.SyncDir(s.dir)
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	s.log = f
	return nil
}

// longMarks is the size in bytes from which on the marks are rewritten.
const longMarks = 1 << 20

// shorten replaces long marks by those that still say something.
func (s *Store) shorten() error {
	if s.marks.whole < longMarks || s.marks.Damaged != nil {
		return nil
	}
	entries, err := Scan(s.dir)
	if err != nil {
		return err
	}
	var text []byte
	for _, v := range s.marks.lines(entries) {
		line, err := v.line()
		if err != nil {
			return err
		}
		text = append(text, line...)
	}
	temp, err := s.working(tempPrefix + "marks")
	if err != nil {
		return err
	}
	if err := writeSynced(temp, text); err != nil {
		return errors.Join(err, filesys.Remove(temp))
	}
	if err := s.log.Close(); err != nil {
		return err
	}
	s.log = nil
	path := filepath.Join(s.dir, marksName)
	if err := filesys.Rename(temp, path); err != nil {
		return err
	}
	s.marks = parseMarks(path, text)
	return filesys.SyncDir(s.dir)
}

// prune removes what Keep does not cover.
func (s *Store) prune() error {
	if s.o.Keep <= 0 {
		return nil // a look at all checkpoints would cost more with each of them
	}
	entries, err := Scan(s.dir)
	if err != nil {
		return fmt.Errorf("remove old checkpoints: %w", err)
	}
	return s.remove(expendable(entries, &s.marks, s.owner, s.o.Keep))
}

// Replace removes the checkpoints of other runs that bear Options.Mark. Once it has,
// it does nothing more: nobody else writes into the folder.
func (s *Store) Replace() error {
	gone, err := s.others()
	if err != nil {
		return fmt.Errorf("remove replaced checkpoints: %w", err)
	}
	err = s.remove(gone)
	s.replaced = err == nil
	return err
}

// others are the checkpoints of other runs that bear Options.Mark, until Replace has
// removed them.
func (s *Store) others() (list []Entry, err error) {
	if s.o.Mark == "" || s.replaced {
		return nil, nil
	}
	entries, err := Scan(s.dir)
	for _, e := range entries {
		if e.Err == nil && e.Manifest.Mark == s.o.Mark && e.Manifest.Owner != s.owner {
			list = append(list, e)
		}
	}
	return list, err
}

// remove takes checkpoints' names away first, durably, so that a removal that a kill
// or a loss of power cuts short leaves no half checkpoint.
func (s *Store) remove(gone []Entry) error {
	var errs []error
	for _, e := range gone {
		temp, err := s.working(gonePrefix + e.Name)
		if err == nil {
			err = filesys.RenameNew(e.Folder, temp)
		}
		if err == nil {
			err = filesys.SyncDir(s.dir)
		}
		if err == nil {
			err = filesys.RemoveAll(temp)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("remove old checkpoint: %w", err))
		}
	}
	return errors.Join(errs...)
}
