package checkpoint

import (
	"sync/atomic"

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
// that training can continue from it. Keep counts confirmed checkpoints only; newer
// ones that are not confirmed are kept in addition.
type Store struct {
	f     filesys.Folder
	o     Options
	owner string // the run's id
	user  int64  // the user number of files that this process creates in the folder
	token string // see Token
	lock  filesys.File
	marks Marks
	log   filesys.File // the marks file, appended to; nil before the first mark
	long  int64        // size in bytes from which the marks are rewritten
	made  filesys.Made // folders that Open made
	notes []string     // see Notes
	wrote bool         // something that must stay was written
	tidy  bool         // checkpoints that Keep does not cover were removed once
	// replaced says that no other run's checkpoint still has the mark.
	replaced bool
	base     atomic.Pointer[Entry] // the checkpoint that the run last wrote or resumed from
}

// Notes returns lines about the folder for the user.
func (s *Store) Notes() []string { return s.notes }

// Dir returns the folder for reading; it is valid while the store is open.
func (s *Store) Dir() Dir { return Dir{s.f} }

// Owner returns the run's id.
func (s *Store) Owner() string { return s.owner }

// Damaged says which of the folder's marks can't be read; nil if all can.
func (s *Store) Damaged() error { return s.marks.Damaged }

// Diverged lists the attempts in this folder that ended with non-finite values, oldest first.
func (s *Store) Diverged() []Divergence { return s.marks.Divergences }

// IsEvaluated tells whether Evaluated was called for a checkpoint.
func (s *Store) IsEvaluated(c Manifest) bool { return s.marks.evaluated[c.key()] }

// Evaluated records that the evaluation after the newest checkpoint is done. The run that wrote the
// checkpoint had left it out.
func (s *Store) Evaluated() error {
	return s.mark(mark{Event: markEvaluated, Key: s.Last().Manifest.key()})
}

// Last returns the checkpoint that the run last wrote or resumed from; nil if there is none.
func (s *Store) Last() *Entry { return s.base.Load() }

// Token returns the random text in this store's lock file. Other processes of the run compare it to
// know that they have opened the same folder.
func (s *Store) Token() string { return s.token }

// Adopt makes a checkpoint that Finish completed the run's newest: see Last.
func (s *Store) Adopt(e Entry) {
	s.base.Store(&e)
	s.wrote = true
}
