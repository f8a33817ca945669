package saving

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/internal/crash"
)

// behind runs the store's work while the steps continue, one task at a time in the order of the
// requests. Its methods are for the trainer's goroutine.
type behind struct {
	last chan struct{} // closed once all tasks are done; nil: there were none

	mu     sync.Mutex
	failed []error // errors that are not reported yet
}

// do runs f after all earlier tasks.
func (b *behind) do(f func()) (done chan struct{}) {
	before := b.last
	done = make(chan struct{})
	b.last = done
	go func() {
		defer crash.Guard()
		defer close(done)
		if before != nil {
			<-before
		}
		f()
	}()
	return done
}

// fail keeps an error until the trainer's goroutine reports it.
func (b *behind) fail(err error) {
	if err == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.failed = append(b.failed, err)
}

// tellBehind warns about tasks of behind that failed.
func (s *Saver) tellBehind() {
	b := &s.behind
	b.mu.Lock()
	failed := b.failed
	b.failed = nil
	b.mu.Unlock()
	for _, err := range failed {
		s.cfg.Warnf("%v", err)
	}
}

// Idle waits until the store has nothing to do.
func (s *Saver) Idle() {
	if s.behind.last != nil {
		<-s.behind.last
	}
	s.tellBehind()
}

// asideSave is a checkpoint that is written while the steps continue.
type asideSave struct {
	step       int
	base, kept int // see Saver
	was        int // Saver.kept before it
	done       chan struct{}
	entry      checkpoint.Entry
	err        error
}

// SaveAside saves the current state asynchronously: the ranks copy it, and the rest is done while
// they continue. Settle reports the result.
func (s *Saver) SaveAside(ctx context.Context) error {
	m, files, err := s.describe()
	if err != nil {
		return err
	}
	if err := s.ranks.Stage(); err != nil {
		return err
	}
	a := &asideSave{step: s.at.Step, base: s.at.Applied(), kept: s.at.Updates(), was: s.kept}
	s.saving, s.kept = a, a.kept
	ranks, store := s.ranks, s.store
	a.done = s.behind.do(func() {
		p, err := store.Begin(m)
		if err != nil {
			a.err = err
			return
		}
		parts, err := ranks.WriteStaged(ctx, p)
		if err != nil {
			a.err = p.Abort(err)
			return
		}
		a.entry, a.err = p.Finish(parts, files)
	})
	return nil
}

// Settle adopts the checkpoint that was being written, once it is durable, or returns its error. It
// waits for the checkpoint only if wait is set. The error is a *checkpoint.NonFinite if a value was
// not finite.
func (s *Saver) Settle(wait bool) error {
	s.tellBehind()
	a := s.saving
	if a == nil {
		return nil
	}
	if !wait {
		select {
		case <-a.done:
		default:
			return nil
		}
	}
	<-a.done
	s.saving = nil
	if a.err != nil {
		s.kept = a.was
		s.at.Unsaved = append(s.at.Unsaved, a.step)
		return a.err
	}
	s.adopt(a.entry, a.base, a.kept)
	return nil
}

// adopt makes a durable checkpoint the run's newest. Its states have had base updates; kept also
// counts a pending one.
func (s *Saver) adopt(e checkpoint.Entry, base, kept int) {
	s.store.Adopt(e)
	s.at.Unsaved = slices.DeleteFunc(s.at.Unsaved, func(step int) bool { return step == e.Step })
	s.told()
	s.base, s.kept = base, max(kept, s.kept)
	s.tend(s.store.Replace)
	s.Confirm() // an update may have been applied since
}

// tend runs a change of the store's folder, asynchronously if saves are. A failure is a warning.
func (s *Saver) tend(how func() error) {
	s.behind.do(func() { s.behind.fail(how()) })
	if !s.Aside() {
		s.Idle()
	}
}

// Aside tells whether saves are asynchronous.
func (s *Saver) Aside() bool { return s.plan.Config.Staging > 0 }

// told reports that a checkpoint is saved after an earlier save failed.
func (s *Saver) told() {
	if s.Unsaved {
		s.cfg.Warnf("the checkpoint of step %d is saved now", s.store.Last().Step)
	}
	s.Unsaved = false
}

// describe returns the manifest and the small files of a checkpoint of the current state.
func (s *Saver) describe() (checkpoint.Manifest, []checkpoint.Blob, error) {
	var m checkpoint.Manifest
	record, err := s.Record()
	if err != nil {
		return m, nil, err
	}
	files, err := s.modelFiles()
	if err != nil {
		return m, nil, fmt.Errorf("save: %w", err)
	}
	m = checkpoint.Manifest{Step: s.at.Step, PlanHash: s.planHash(), Ranks: s.cfg.Ranks, Zero: s.cfg.Zero, Run: record, Tensors: s.states.Tensors()}
	return m, files, nil
}

// planHash returns the plan's hash, which it computes once: hashing takes as long as copying some
// megabytes of states.
func (s *Saver) planHash() string {
	if s.hash == "" {
		s.hash = s.plan.Hash()
	}
	return s.hash
}
