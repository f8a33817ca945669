package checkpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
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
	// Folders opens the folder; nil: filesys.System.
	Folders filesys.Opener
}

// Store is a checkpoint folder that one process has open for one run. Its methods
// are for one goroutine at a time, but for Last, which may be asked at any time.
//
// The folder is opened once, by its path, and everything is done in that folder: what has
// its path later is not looked at. Marks and locks that another user made are refused:
// they would have this process remove what it did not write.
//
// A checkpoint is confirmed by the first update that is applied after it: only then
// is it known that training can go on from it. Prune counts confirmed ones alone,
// and keeps the newest beside them.
type Store struct {
	f     filesys.Folder
	o     Options
	owner string // the run's id
	user  int64  // to whom files belong that this process makes in the folder
	token string // see Token
	lock  filesys.File
	marks Marks
	log   filesys.File // of marks, appended to; nil before the first
	long  int64        // bytes of marks from which on they are rewritten
	made  filesys.Made // folders that Open made
	notes []string     // see Notes
	wrote bool         // something that stays
	tidy  bool         // what Keep does not cover was removed once
	// replaced says that no other run's checkpoint bears the mark any more.
	replaced bool
	base     atomic.Pointer[Entry] // the checkpoint that the run wrote or went on from last
}

// Open makes dir, locks it for this process and clears what killed saves of this
// store left under its own temporary names. The error is a *Busy where another
// process has it, a *Foreign where another user has used it.
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
		if err := s.openLog(); err != nil { // better now than after the last step
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
		s.notes = append(s.notes, fmt.Sprintf("%s may rename and remove checkpoints in %s (mode %03o); chmod go-w makes it yours alone, chmod +t keeps others from yours", who, s.f.Path(), st.Mode.Perm()))
	}
	return s.shorten()
}

// clear removes what a killed save left under a name.
func (s *Store) clear(name string) error {
	st, err := s.f.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil && st.Owner != s.user {
		s.notes = append(s.notes, fmt.Sprintf("%s stays: it belongs to user %d, not to %d as what this process makes there", filepath.Join(s.f.Path(), name), st.Owner, s.user))
		return nil
	}
	if err == nil {
		err = filesys.RemoveAll(s.f, name)
	}
	return err
}

// Notes are lines about the folder that a person should see.
func (s *Store) Notes() []string { return s.notes }

// Dir is the folder, for reading, as long as the store is open.
func (s *Store) Dir() Dir { return Dir{s.f} }

// Close gives the folder back. One that Open made and nothing was written to goes.
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
	in   filesys.Folder // the checkpoint folder
	name string         // of the folder that is written
	f    filesys.Folder
	m    Manifest
}

// Begin starts a checkpoint of m.Step, with its Tensors, Run and what it says for
// information.
func (s *Store) Begin(m Manifest) (*Pending, error) {
	now := time.Now().UTC().Truncate(time.Second)
	m.ID, m.Owner, m.Mark, m.Written = random(), s.owner, s.o.Mark, &now
	others, err := s.others()
	if err != nil {
		return nil, fmt.Errorf("save checkpoint of step %d in %s: %w", m.Step, s.f.Path(), err)
	}
	for _, e := range others {
		if !slices.Contains(m.Replaces, e.Manifest.Owner) {
			m.Replaces = append(m.Replaces, e.Manifest.Owner)
		}
	}
	return s.begin(m)
}

func (s *Store) begin(m Manifest) (*Pending, error) {
	p := &Pending{m: m}
	err := s.stillOurs()
	if err == nil {
		err = s.shorten()
	}
	p.in = s.f
	if err == nil {
		p.name, err = s.working(tempPrefix + Name(m.Step, 1))
	}
	if err == nil {
		err = s.f.Mkdir(p.name, 0o777)
	}
	if err == nil {
		p.f, err = s.Dir().writing(p.name, s.user)
	}
	if err != nil {
		return nil, p.failed(err)
	}
	return p, nil
}

// writing opens the folder of a Pending by its name. It must belong to the user to whom
// files belong that the caller makes beside it.
func (d Dir) writing(name string, user int64) (filesys.Folder, error) {
	f, err := d.f.Sub(name)
	if err != nil {
		return nil, err
	}
	st, err := f.Info()
	if err == nil && st.Owner != user {
		err = fmt.Errorf("%s belongs to user %d now, not to %d: somebody has put another folder in its place", f.Path(), st.Owner, user)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (p *Pending) failed(err error) error {
	return fmt.Errorf("save checkpoint of step %d in %s: %w", p.m.Step, p.in.Path(), err)
}

// Folder is where the ranks' files are written.
func (p *Pending) Folder() filesys.Folder { return p.f }

// Name is the folder's name in the checkpoint folder: see Joined.Writing.
func (p *Pending) Name() string { return p.name }

// Finish completes the checkpoint of the parts' files, makes it durable and gives it
// its name.
func (p *Pending) Finish(parts []File, blobs []Blob) (Entry, error) {
	m, err := writeRest(p.f, p.m, parts, blobs)
	var e Entry
	if err == nil {
		e, err = p.commit(m)
	}
	if err != nil {
		return e, p.Abort(err)
	}
	return e, p.f.Close()
}

// Abort removes what was written, because of err, and returns that as a failed
// save's.
func (p *Pending) Abort(err error) error {
	return p.failed(errors.Join(err, p.f.Close(), filesys.RemoveAll(p.in, p.name)))
}

// Adopt makes a checkpoint that Finish completed the one that the run wrote last.
func (s *Store) Adopt(e Entry) {
	s.base.Store(&e)
	s.wrote = true
}

// stillOurs sees that the lock still has its name. Where somebody removed that, it is
// taken again; where the folder is gone, a new one is made in its place, without what it
// remembered.
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
	err = s.lock.Close() // its name is gone already
	s.lock, s.replaced = again, false
	return err
}

// reopen makes the folder anew that was removed. What has its path meanwhile must be empty,
// and no link: it may be another run's.
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

// commit gives a complete folder the first free name of its step.
func (p *Pending) commit(m Manifest) (Entry, error) {
	e := Entry{Step: m.Step, Copy: 1, Manifest: m}
	for ; ; e.Copy++ {
		e.Name = Name(e.Step, e.Copy)
		e.Folder = filepath.Join(p.in.Path(), e.Name)
		_, err := p.in.Lstat(e.Name)
		if errors.Is(err, fs.ErrNotExist) {
			err = p.in.RenameNew(p.name, e.Name)
			if err == nil {
				return e, errors.Join(p.named(e.Name), p.in.Sync())
			}
		}
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return e, err
		}
	}
}

// named sees that a name is of the folder that was written: somebody who may write beside
// it may have put another in its place.
func (p *Pending) named(name string) error {
	ours, err := p.f.Info()
	if err != nil {
		return err
	}
	now, err := p.in.Lstat(name)
	if err == nil && !filesys.Same(ours, now) {
		err = fmt.Errorf("%s is not the folder that this run has written: somebody has put another in its place", filepath.Join(p.in.Path(), name))
	}
	return err
}

// working journals a temporary name before it is used, so that whoever opens the
// folder next knows what of a killed process is ours to remove.
func (s *Store) working(stem string) (name string, err error) {
	name = stem + "-" + random()
	return name, s.mark(mark{Event: markWorking, Name: name})
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
		return fmt.Errorf("mark %s in %s: %w", v.Event, s.f.Path(), err)
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
	f, err := s.f.OpenFile(marksName, os.O_WRONLY|os.O_CREATE|filesys.NoWait, 0o666)
	if err != nil {
		return err
	}
	st, err := f.Stat()
	if err == nil {
		err = s.own(marksName, st)
	}
	if err == nil && st.Size > s.marks.whole {
		err = f.Truncate(s.marks.whole)
	}
	if err == nil {
		err = s.f.Sync()
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	s.log = f
	return nil
}

// longMarks is the size in bytes from which on the marks are rewritten.
const longMarks = 512 << 10

// shorten replaces long marks by those that still say something.
func (s *Store) shorten() error {
	if s.marks.whole < s.long || s.marks.Damaged != nil && s.marks.whole < maxMarks/2 {
		return nil
	}
	entries, err := s.Dir().Scan()
	if err != nil {
		return err
	}
	names, err := s.f.Names()
	if err != nil {
		return err
	}
	var text []byte
	for _, v := range s.marks.lines(entries, names) {
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
	if err := writeSynced(s.f, temp, text); err != nil {
		return errors.Join(err, filesys.RemoveAll(s.f, temp))
	}
	if err := s.log.Close(); err != nil {
		return err
	}
	s.log = nil
	if err := s.f.Rename(temp, marksName); err != nil {
		return err
	}
	s.marks = parseMarks(filepath.Join(s.f.Path(), marksName), bytes.NewReader(text))
	s.long = max(longMarks, 2*s.marks.whole) // many checkpoints have many lines that say something
	return s.f.Sync()
}
