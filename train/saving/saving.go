// Package saving writes a run's checkpoints and resumes from them: when the store may be
// told what, what a checkpoint says of its run, and whether there is room for it.
package saving

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/comm"
	"github.com/spillway-ml/spillway/config"
	"github.com/spillway-ml/spillway/data"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/plan"
	"github.com/spillway-ml/spillway/planner"
	"github.com/spillway-ml/spillway/run"
)

// Progress is how far a run has come. The Trainer counts, a Saver reads.
type Progress struct {
	Step    int  // steps done
	Skipped int  // of these, steps whose update was left out
	Pending bool // the last step's update waits for the next step, or a flush
	Scale   Scale
	Noise   []Moments // of the newest steps, the latest last; the list is never changed
	Base    Base      // with adapters
	Receipt string    // hash of the receipt's last line; "": there is none
	Unsaved []int     // steps whose saves failed since the receipt's last line
	EvalDue bool      // the evaluation after the last step was canceled
}

// Scale is the loss scale between two steps, as the program's Scaler has it.
type Scale struct {
	Scale float64 `json:"scale"` // of the next step
	Clean float64 `json:"clean"` // updates since it last moved; negative: overflows in a row
}

// Moments are what a step says of the gradient noise scale: estimates of the squared norm of
// the gradient's mean and of the trace of a row's covariance.
type Moments struct {
	Square float64 `json:"square"`
	Trace  float64 `json:"trace"`
}

// Updates counts the updates of the run, with one that waits for the next step.
func (p *Progress) Updates() int { return p.Step - p.Skipped }

// Applied is how many updates the states have seen, or one less.
func (p *Progress) Applied() int {
	n := p.Updates()
	if p.Pending {
		n--
	}
	return n
}

// Data is what a run reads its samples from.
type Data interface {
	Sampler() *data.Sampler
	// OwnSamples tells that the program brought the samples along.
	OwnSamples() bool
	Fingerprint() (data.Fingerprint, error)
	// Template is the chat template that the run was given; "": the model's.
	Template() string
}

// Run is what a Saver is told of the run that it saves.
type Run struct {
	Config *planner.Resolved
	Plan   *plan.Plan
	Data   Data
	// Arithmetic names what decides the last bits of a step, see Arithmetic.
	Arithmetic string
	Progress   *Progress
	Folders    filesys.Opener // of the folder of checkpoints
}

// Saver writes the checkpoints of a run and resumes from them. Its methods are for the
// Trainer's goroutine.
type Saver struct {
	cfg        *planner.Resolved
	plan       *plan.Plan
	data       Data
	arithmetic string
	at         *Progress

	store  *checkpoint.Store
	ranks  *run.Ranks  // nil before Over
	states *run.States // of the ranks
	print  data.Fingerprint
	files  []checkpoint.Blob // small files of every checkpoint; nil: not made yet
	notes  []string          // what a person should know of the checkpoint that the run goes on from

	base      int        // updates that the newest checkpoint's states have seen
	kept      int        // base, with an update that waits for the next step
	saving    *asideSave // a checkpoint that is being written; nil: none
	behind    behind
	confirmed *checkpoint.Entry // the newest one that the store was told of, see Confirm
	hash      string            // of the plan, once a checkpoint was saved: see planHash
	replays   bool              // see Replay
	damaged   map[string]error  // by name, checkpoints that turned out damaged as they were loaded
	// Unsaved tells that a checkpoint that was due could not be saved.
	Unsaved bool
}

// Look refuses, before anything is made, what the folder of
// checkpoints can't be used for: a start beside the checkpoints of another run,
// and a second process.
func Look(c *config.Config, folders filesys.Opener) error {
	if c.Checkpoint == "" {
		return nil
	}
	if err := refuseModelFolder(c); err != nil {
		return err
	}
	d, err := checkpoint.OpenDir(folders, c.Checkpoint)
	if err == nil {
		err = d.Held()
	}
	if err != nil {
		return fmt.Errorf("Config.Checkpoint %s: %w", c.Checkpoint, errors.Join(err, d.Close()))
	}
	return errors.Join(refuseUsed(c, d), d.Close())
}

// refuseUsed refuses a start beside checkpoints that it would not go on from.
func refuseUsed(c *config.Config, d checkpoint.Dir) error {
	if c.Resume {
		return nil
	}
	entries, err := d.Scan()
	if err != nil {
		return fmt.Errorf("Config.Checkpoint %s: %w", c.Checkpoint, err)
	}
	if n := len(entries); n > 0 && c.CheckpointMark == "" {
		return config.Refuse("Config.Checkpoint %s holds checkpoints already (%d, the newest is %s); give Config.Resume to go on from it, or a fresh folder", c.Checkpoint, n, entries[n-1].Name)
	}
	for _, e := range entries {
		if e.Err != nil || e.Manifest.Mark != c.CheckpointMark {
			return config.Refuse("Config.Checkpoint %s: %s does not bear the mark %q of runs that may be replaced; give Config.Resume to go on from the newest, or a fresh folder", c.Checkpoint, e.Name, c.CheckpointMark)
		}
	}
	return nil
}

// Open locks the folder of checkpoints, and looks again: another run may have come and
// gone since Look. The Saver is not nil where there is something to close.
func Open(r Run) (*Saver, error) {
	c := r.Config
	store, err := checkpoint.Open(c.Checkpoint, checkpoint.Options{Keep: c.Keep, Mark: c.CheckpointMark, Folders: r.Folders})
	if errors.Is(err, fs.ErrPermission) {
		return nil, config.Refuse("Config.Checkpoint %s: %w; give a folder that can be written", c.Checkpoint, err)
	}
	if err != nil {
		return nil, fmt.Errorf("Config.Checkpoint %s: %w", c.Checkpoint, err)
	}
	s := &Saver{cfg: c, plan: r.Plan, data: r.Data, arithmetic: r.Arithmetic, at: r.Progress, store: store, damaged: map[string]error{}}
	if err := refuseUsed(&c.Config, store.Dir()); err != nil {
		return s, err
	}
	for _, note := range store.Notes() {
		c.Warnf("Config.Checkpoint: %s", note)
	}
	if s.print, err = r.Data.Fingerprint(); err != nil {
		return s, fmt.Errorf("Config.Data: %w", err)
	}
	if err := store.Damaged(); err != nil {
		c.Warnf("what Config.Checkpoint %s remembers beside its checkpoints is damaged and read in part: %v", c.Checkpoint, err)
	}
	return s, nil
}

// Over gives the Saver the ranks whose states it saves, and each rank the folder.
func (s *Saver) Over(ranks *run.Ranks, states *run.States) error {
	s.ranks, s.states = ranks, states
	path, err := filepath.Abs(s.store.Dir().Path())
	if err == nil {
		err = ranks.Join(path, s.store.Token())
	}
	if errors.Is(err, comm.ErrLost) {
		return fmt.Errorf("Config.Checkpoint %s: %w", s.cfg.Checkpoint, err)
	}
	if err != nil { // not a fault of the run, whichever process says it
		return fmt.Errorf("Config.Checkpoint %s: %v", s.cfg.Checkpoint, err)
	}
	return nil
}

// Folder opens the folder of checkpoints once more, for its own use by somebody else.
func (s *Saver) Folder() (filesys.Folder, error) { return s.store.Dir().Again() }

// Close gives the folder back.
func (s *Saver) Close() {
	if err := s.store.Close(); err != nil { // what was saved is complete and synced
		s.cfg.Warnf("close Config.Checkpoint %s: %v", s.cfg.Checkpoint, err)
	}
}

// Save writes a checkpoint of the state as it is, which no update waits for, and returns
// its folder. No other save is under way. The error is a *checkpoint.NonFinite where a
// value is not finite; then, and where ctx is canceled before the checkpoint is whole,
// nothing is saved.
func (s *Saver) Save(ctx context.Context) (string, error) {
	if s.Aside() {
		if err := s.SaveAside(ctx); err != nil {
			return "", err
		}
		if err := s.Settle(true); err != nil {
			return "", err
		}
		s.Idle()
		return s.store.Last().Folder, nil
	}
	m, files, err := s.describe()
	if err != nil {
		return "", err
	}
	saved, err := s.write(ctx, m, files)
	if err != nil {
		s.at.Unsaved = append(s.at.Unsaved, s.at.Step)
		return "", err
	}
	s.adopt(saved, s.at.Applied(), s.at.Updates())
	return saved.Folder, nil
}

// write saves the states as they are, each rank its own.
func (s *Saver) write(ctx context.Context, m checkpoint.Manifest, files []checkpoint.Blob) (checkpoint.Entry, error) {
	p, err := s.store.Begin(m)
	if err != nil {
		return checkpoint.Entry{}, err
	}
	parts, err := s.ranks.Save(ctx, p)
	if err != nil {
		return checkpoint.Entry{}, p.Abort(err)
	}
	return p.Finish(parts, files)
}

// Lost adds to the error of a save that ends the run what is left, and what to do.
func (s *Saver) Lost(err error) error { return lost(err, s.store.Last()) }

func lost(err error, last *checkpoint.Entry) error {
	left, on := "nothing is saved", "start again"
	if last != nil {
		left, on = fmt.Sprintf("the newest checkpoint is of step %d", last.Step), "go on from it with Config.Resume"
	}
	// Another process's error has its text alone.
	if errors.Is(err, syscall.ENOSPC) || strings.Contains(err.Error(), syscall.ENOSPC.Error()) {
		return fmt.Errorf("%w; %s: free room there, then %s", err, left, on)
	}
	return fmt.Errorf("%w; %s: remove the cause, then %s", err, left, on)
}

// Evaluated remembers that the evaluation after the newest checkpoint's step, which was due, is
// done.
func (s *Saver) Evaluated() {
	if last := s.store.Last(); last != nil && last.Step == s.at.Step {
		s.tend(s.store.Evaluated)
	}
}

// Saved tells whether the newest checkpoint holds the state as it is.
func (s *Saver) Saved() bool { return s.store.Last() != nil && s.store.Last().Step == s.at.Step }

// Worth tells whether an update followed the newest checkpoint. While steps are skipped
// none does: more checkpoints would hold the same states, and hide the last one from
// which training is known to go on.
func (s *Saver) Worth() bool {
	return s.store.Last() == nil && s.saving == nil || s.at.Updates() > s.kept
}

// Confirm tells the store that training went on from its newest checkpoint: an update was
// applied after it. That is tried once for each: the next is another try.
func (s *Saver) Confirm() {
	last := s.store.Last()
	if last == nil || last == s.confirmed || s.at.Applied() <= s.base {
		return
	}
	s.confirmed = last
	s.tend(s.store.Confirm)
}
