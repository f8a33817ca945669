// Package saving writes a run's checkpoints and resumes from them. It decides when the store may
// record events, describes the run in each checkpoint, and checks whether there is room for it.
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

// Progress is the progress of a run. The Trainer updates it, and a Saver reads it.
type Progress struct {
	Step    int  // steps done
	Skipped int  // of these, steps whose update was left out
	Pending bool // the last step's update is applied in the next step, or by a flush
	Scale   Scale
	Noise   []Moments // of the newest steps, the latest last; the list is never changed
	Base    Base      // with adapters
	Receipt string    // hash of the receipt's last line; "": there is none
	Unsaved []int     // steps whose saves failed since the receipt's last line
	EvalDue bool      // the evaluation after the last step was canceled
}

// Scale is the loss scale between two steps, as in the program's Scaler.
type Scale struct {
	Scale float64 `json:"scale"` // of the next step
	Clean float64 `json:"clean"` // updates since it last moved; negative: overflows in a row
}

// Moments are a step's estimates for the gradient noise scale: of the squared norm of the
// gradient's mean, and of the trace of a row's covariance.
type Moments struct {
	Square float64 `json:"square"`
	Trace  float64 `json:"trace"`
}

// Updates returns the number of the run's updates, including a pending one.
func (p *Progress) Updates() int { return p.Step - p.Skipped }

// Applied returns the number of updates that the states have had: all without a pending one.
func (p *Progress) Applied() int {
	n := p.Updates()
	if p.Pending {
		n--
	}
	return n
}

// Data is the data set that a run reads its samples from.
type Data interface {
	Sampler() *data.Sampler
	// OwnSamples tells whether the program provides the samples.
	OwnSamples() bool
	Fingerprint() (data.Fingerprint, error)
	// Template is the configured chat template; "": the model's.
	Template() string
}

// Run describes the run that a Saver saves.
type Run struct {
	Config *planner.Resolved
	Plan   *plan.Plan
	Data   Data
	// Arithmetic identifies the arithmetic that the last bits of a step depend on, see the function
	// Arithmetic.
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
	states *run.States // the ranks' states
	print  data.Fingerprint
	files  []checkpoint.Blob // small files of every checkpoint; nil: not made yet
	notes  []string          // see Notes

	base      int        // updates in the newest checkpoint's states
	kept      int        // base, plus an update that was pending
	saving    *asideSave // a checkpoint that is being written; nil: none
	behind    behind
	confirmed *checkpoint.Entry // the newest confirmed checkpoint, see Confirm
	hash      string            // hash of the plan, see planHash; "": not computed yet
	replays   bool              // see Replay
	damaged   map[string]error  // by name, checkpoints that turned out damaged while they were loaded
	// Unsaved tells whether a due checkpoint could not be saved.
	Unsaved bool
}

// Look refuses, before anything is created, a folder of checkpoints that the run can't use: one
// with the checkpoints of another run, and one that another process has open.
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

// refuseUsed refuses to start a new run in a folder with checkpoints, unless all have the mark of
// this run.
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

// Open locks the folder of checkpoints, and checks it again, since another run may have used it
// since Look. The Saver is not nil if there is something to close.
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

// Over sets the ranks whose states the Saver saves, and gives each rank the folder.
func (s *Saver) Over(ranks *run.Ranks, states *run.States) error {
	s.ranks, s.states = ranks, states
	path, err := filepath.Abs(s.store.Dir().Path())
	if err == nil {
		err = ranks.Join(path, s.store.Token())
	}
	if errors.Is(err, comm.ErrLost) {
		return fmt.Errorf("Config.Checkpoint %s: %w", s.cfg.Checkpoint, err)
	}
	if err != nil { // not an error of the run, whichever process reports it
		return fmt.Errorf("Config.Checkpoint %s: %v", s.cfg.Checkpoint, err)
	}
	return nil
}

// Folder opens the folder of checkpoints again, for a caller that closes it.
func (s *Saver) Folder() (filesys.Folder, error) { return s.store.Dir().Again() }

// Close releases the folder.
func (s *Saver) Close() {
	if err := s.store.Close(); err != nil { // saved checkpoints are complete and synced
		s.cfg.Warnf("close Config.Checkpoint %s: %v", s.cfg.Checkpoint, err)
	}
}

// Save writes a checkpoint of the current state, which must have no pending update, and returns its
// folder. No other save may be running. The error is a *checkpoint.NonFinite if a value is not
// finite. In that case, and if ctx is canceled before the checkpoint is complete, nothing is saved.
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

// write saves the current states; each rank writes its part.
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

// Lost adds the newest checkpoint and a remedy to the error of a save that ends the run.
func (s *Saver) Lost(err error) error { return lost(err, s.store.Last()) }

func lost(err error, last *checkpoint.Entry) error {
	left, on := "nothing is saved", "start again"
	if last != nil {
		left, on = fmt.Sprintf("the newest checkpoint is of step %d", last.Step), "go on from it with Config.Resume"
	}
	// An error from another process has only its text.
	if errors.Is(err, syscall.ENOSPC) || strings.Contains(err.Error(), syscall.ENOSPC.Error()) {
		return fmt.Errorf("%w; %s: free room there, then %s", err, left, on)
	}
	return fmt.Errorf("%w; %s: remove the cause, then %s", err, left, on)
}

// Evaluated records that the evaluation that was due after the newest checkpoint's step is done.
func (s *Saver) Evaluated() {
	if last := s.store.Last(); last != nil && last.Step == s.at.Step {
		s.tend(s.store.Evaluated)
	}
}

// Saved tells whether the newest checkpoint holds the current state.
func (s *Saver) Saved() bool { return s.store.Last() != nil && s.store.Last().Step == s.at.Step }

// Worth tells whether there was an update since the newest checkpoint. While steps are skipped
// there is none: more checkpoints would hold the same states, and hide the last one from which
// training is known to continue.
func (s *Saver) Worth() bool {
	return s.store.Last() == nil && s.saving == nil || s.at.Updates() > s.kept
}

// Confirm tells the store that training continued from its newest checkpoint: an update was applied
// after it. It does so once for each checkpoint, even if that fails.
func (s *Saver) Confirm() {
	last := s.store.Last()
	if last == nil || last == s.confirmed || s.at.Applied() <= s.base {
		return
	}
	s.confirmed = last
	s.tend(s.store.Confirm)
}
