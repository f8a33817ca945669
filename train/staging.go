package train

import (
	"context"
	"errors"
	"fmt"
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
func (t *Trainer) tellBehind() {
	b := &t.behind
	b.mu.Lock()
	failed := b.failed
	b.failed = nil
	b.mu.Unlock()
	for _, err := range failed {
		t.cfg.Warnf("%v", err)
	}
}

// idle waits until the store has nothing to do.
func (t *Trainer) idle() {
	if t.behind.last != nil {
		<-t.behind.last
	}
	t.tellBehind()
}

// asideSave is a checkpoint that is written while the steps go on.
type asideSave struct {
	step       int
	base, kept int // see Trainer
	was        int // Trainer.kept before it
	done       chan struct{}
	entry      checkpoint.Entry
	err        error
}

// saveAside saves the state as it is: the ranks copy it, and all else is done while they
// go on. What becomes of it settle tells.
func (t *Trainer) saveAside(ctx context.Context) error {
	m, files, err := t.describeSave()
	if err != nil {
		return err
	}
	if err := t.ranks.Stage(); err != nil {
		return err
	}
	s := &asideSave{step: t.step, base: t.updatesDone(), kept: t.updatesSoFar(), was: t.kept}
	t.saving, t.kept = s, s.kept
	ranks, store := t.ranks, t.store
	s.done = t.behind.do(func() {
		p, err := store.Begin(m)
		if err != nil {
			s.err = err
			return
		}
		parts, err := ranks.WriteStaged(ctx, p)
		if err != nil {
			s.err = p.Abort(err)
			return
		}
		s.entry, s.err = p.Finish(parts, files)
	})
	return nil
}

// settle takes note of the checkpoint that was being written, once it is durable or
// has failed; it does not wait for it unless it is told to.
func (t *Trainer) settle(wait bool) error {
	t.tellBehind()
	s := t.saving
	if s == nil {
		return nil
	}
	if !wait {
		select {
		case <-s.done:
		default:
			return nil
		}
	}
	<-s.done
	t.saving = nil
	if s.err == nil {
		t.adopt(s.entry, s.base, s.kept)
		return nil
	}
	t.kept = s.was
	var odd *checkpoint.NonFinite
	if !errors.As(s.err, &odd) {
		return s.err
	}
	if t.fatal != nil { // the steps after it have found that out
		return nil
	}
	return t.unsound(odd)
}

// adopt makes a durable checkpoint the run's newest, whose states have seen base
// updates and, with one that waits for the next step, kept.
func (t *Trainer) adopt(e checkpoint.Entry, base, kept int) {
	t.store.Adopt(e)
	t.told()
	t.base, t.kept = base, max(kept, t.kept)
	t.tend(t.store.Replace)
	t.confirm() // an update may have been applied after it already
}

// tend has the store put its folder in order, behind the steps where saves are. That it
// fails is told.
func (t *Trainer) tend(how func() error) {
	t.behind.do(func() { t.behind.fail(how()) })
	if !t.savesAside() {
		t.idle()
	}
}

// settled is settle for a run that ends anyway: what failed is a warning. The store is
// idle then.
func (t *Trainer) settled() {
	if err := t.settle(true); err != nil && t.fatal == nil {
		t.cfg.Warnf("%v", err)
	}
	t.idle()
}

// savesAside tells whether saves are asynchronous.
func (t *Trainer) savesAside() bool { return t.plan.Config.Staging > 0 }

// describeSave is what a checkpoint of the state as it is says of the run.
func (t *Trainer) describeSave() (checkpoint.Manifest, []checkpoint.Blob, error) {
	var m checkpoint.Manifest
	if err := t.flush(); err != nil {
		return m, nil, err
	}
	record, err := t.record()
	if err != nil {
		return m, nil, err
	}
	files, err := t.modelFiles()
	if err != nil {
		return m, nil, fmt.Errorf("save: %w", err)
	}
	m = checkpoint.Manifest{Step: t.step, PlanHash: t.planHash(), Ranks: t.cfg.Ranks, Zero: t.cfg.Zero, Run: record, Tensors: t.states.Tensors()}
	return m, files, nil
}

// planHash is the plan's, which is fixed: hashing it takes as long as copying some
// megabytes of states.
func (t *Trainer) planHash() string {
	if t.hash == "" {
		t.hash = t.plan.Hash()
	}
	return t.hash
}
