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

// Options says how a run opens its checkpoint folder.
type Options struct {
	// Keep is how many confirmed checkpoints of this run are kept; 0: all.
	Keep int
	// Mark, if not empty, is recorded in every manifest. Once this run's first checkpoint is
	// complete, other runs' checkpoints with the same mark are removed, and Manifest.Replaces
	// lists those runs.
	Mark string
	// Folders opens the folder; nil: filesys.System.
	Folders filesys.Opener
}

// Store is a checkpoint folder that one process has open for one run. Its methods are for one
// goroutine at a time, except Last, which may be called concurrently.
//
// The folder is opened once, by its path, and stays open; a folder that takes that path later
// is ignored. Marks and locks made by another user are refused: they could make this process
// remove files that it did not write.
//
// A checkpoint is confirmed by the first update that is applied after it: only then is it known
// that training can continue from it. Keep counts confirmed checkpoints only; the newest is
// kept in addition.
type Store struct {
	f     filesys.Folder
	o     Options
	owner string // the run's id
	user  int64  // the owner of files that this process makes in the folder
	token string // see Token
	lock  filesys.File
	marks Marks
	log   filesys.File // the marks file, appended to; nil before the first mark
	long  int64        // size in bytes from which the marks are rewritten
	made  filesys.Made // folders that Open made
	notes []string     // see Notes
	wrote bool         // something that must stay was written
	tidy  bool         // checkpoints that Keep does not cover were removed once
	// replaced says that no other run's checkpoint has the mark any more.
	replaced bool
	base     atomic.Pointer[Entry] // the checkpoint that the run last wrote or resumed from
}

// Open makes dir, locks it for this process and removes what killed saves of this store left
// under its temporary names. The error is a *Busy if another process has the folder open, and a
// *Foreign if another user has used it.
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

// clear removes a temporary folder or file that a killed save left.
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

// Notes are lines about the folder to show to the user.
func (s *Store) Notes() []string { return s.notes }

// Dir returns the folder for reading; it is valid while the store is open.
func (s *Store) Dir() Dir { return Dir{s.f} }

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

// Owner is the id of the run.
func (s *Store) Owner() string { return s.owner }

// Damaged says which of the folder's marks can't be read; nil if all can.
func (s *Store) Damaged() error { return s.marks.Damaged }

// Diverged lists the attempts in this folder that ended with non-finite values, oldest first.
func (s *Store) Diverged() []Divergence { return s.marks.Divergences }

// Continue makes the run resume from a checkpoint of the folder, as the run that the checkpoint
// names, if it names one. Newer checkpoints of that run no longer count as confirmed.
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

// Last is the checkpoint that the run last wrote or resumed from; nil if there is none.
func (s *Store) Last() *Entry { return s.base.Load() }

// Save writes a checkpoint of m.Step, all of whose parts are in this process, and returns its
// folder. The folder appears under its name complete and synced, or not at all. An existing
// name is never overwritten: the step's next free name is used. Non-finite values are a
// *NonFinite error.
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

// Pending is a checkpoint that is being written. Any process may write its ranks' files into
// Folder; Finish then gives it its name. One goroutine may call its methods concurrently with
// those of the Store.
type Pending struct {
	in   filesys.Folder // the checkpoint folder
	name string         // of the folder that is written
	f    filesys.Folder
	m    Manifest
}

// Begin starts a checkpoint of m.Step. m also has the Tensors, the Run and the informational
// fields.
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

// writing opens the folder of a Pending by its name. The folder must belong to user.
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

// Name is the folder's temporary name in the checkpoint folder: see Joined.Writing.
func (p *Pending) Name() string { return p.name }

// Finish writes the rest of the checkpoint, makes it durable and gives it its name.
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

// Abort removes the written files after the failure err, and returns err as the error of the
// save.
func (p *Pending) Abort(err error) error {
	return p.failed(errors.Join(err, p.f.Close(), filesys.RemoveAll(p.in, p.name)))
}

// Adopt makes a checkpoint that Finish completed the run's newest: see Last.
func (s *Store) Adopt(e Entry) {
	s.base.Store(&e)
	s.wrote = true
}

// stillOurs checks that the lock file still has its name. If somebody removed the name the lock
// is taken again. If the folder is gone a new one is made in its place, without the old marks.
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

// named checks that a name still refers to the folder that was written. Anyone with write
// access beside it may have replaced it.
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

// working records a temporary name in the marks before it is used. Whoever opens the folder
// after a kill then knows which leftovers are ours to remove.
func (s *Store) working(stem string) (name string, err error) {
	name = stem + "-" + random()
	return name, s.mark(mark{Event: markWorking, Name: name})
}

// Confirm records that an update was applied after the newest checkpoint, and removes
// checkpoints that Options.Keep no longer covers. The first call also removes those of a run
// that was killed between confirming and removing. Without a new checkpoint further calls do
// nothing.
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

// MarkDivergence records that the run stopped at a step with non-finite values. If no update
// was applied after the newest checkpoint, that checkpoint is passed over from now on.
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

// mark appends a mark and syncs it, so that it survives a power loss.
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

// append writes a line after the last whole line of the marks.
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

// longMarks is the size in bytes from which the marks are rewritten.
const longMarks = 512 << 10

// shorten rewrites a long marks file with only the marks that still matter.
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
