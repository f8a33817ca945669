package saving

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/internal/crash"
)

// behind is what the store does while the steps go on: one thing after the other, in the
// order in which it was asked for. Its methods are for the trainer's goroutine.
type behind struct {
	last chan struct{} // closed once all of it is done; nil: there was none

	mu     sync.Mutex
	failed []error // what is to be told
}

// do runs f once all before it is done.
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

// fail keeps an error for the trainer's goroutine to tell.
func (b *behind) fail(err error) {
	if err == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.failed = append(b.failed, err)
}

// tellBehind warns of what has failed behind the steps.
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

// asideSave is a checkpoint that is written while the steps go on.
type asideSave struct {
	step       int
	base, kept int // see Saver
	was        int // Saver.kept before it
	done       chan struct{}
	entry      checkpoint.Entry
	err        error
}

// SaveAside saves the state as it is: the ranks copy it, and all else is done while they
// go on. What becomes of it Settle tells.
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

// Settle takes note of the checkpoint that was being written, once it is durable or has
// failed; it does not wait for it unless it is told to. The error is a
// *checkpoint.NonFinite where a value was not finite.
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

// adopt makes a durable checkpoint the run's newest, whose states have seen base
// updates and, with one that waits for the next step, kept.
func (s *Saver) adopt(e checkpoint.Entry, base, kept int) {
	s.store.Adopt(e)
	s.at.Unsaved = slices.DeleteFunc(s.at.Unsaved, func(step int) bool { return step == e.Step })
	s.told()
	s.base, s.kept = base, max(kept, s.kept)
	s.tend(s.store.Replace)
	s.Confirm() // an update may have been applied after it already
}

// tend has the store put its folder in order, behind the steps where saves are. That it
// fails is told.
func (s *Saver) tend(how func() error) {
	s.behind.do(func() { s.behind.fail(how()) })
	if !s.Aside() {
		s.Idle()
	}
}

// Aside tells whether saves are asynchronous.
func (s *Saver) Aside() bool { return s.plan.Config.Staging > 0 }

// told says that a checkpoint is durable, where that was in doubt.
func (s *Saver) told() {
	if s.Unsaved {
		s.cfg.Warnf("the checkpoint of step %d is saved now", s.store.Last().Step)
	}
	s.Unsaved = false
}

// describe is what a checkpoint of the state as it is says of the run.
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

// planHash is the plan's, which is fixed: hashing it takes as long as copying some
// megabytes of states.
func (s *Saver) planHash() string {
	if s.hash == "" {
		s.hash = s.plan.Hash()
	}
	return s.hash
}
