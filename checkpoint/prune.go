package checkpoint

import (
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// expendable returns owner's checkpoints that Config.Keep does not cover, from entries in ascending
// order. These are all that are older than the newest keep confirmed ones (an update followed
// them), and unconfirmed ones older than the newest confirmed one. keep 0 keeps all.
//
// Checkpoints that the run left behind when it resumed from an older one do not count as
// confirmed. They are ahead of the run's present steps; counting them would remove the ones
// that the run writes now.
func expendable(entries []Entry, m *Marks, owner string, keep int) []Entry {
	if keep <= 0 || owner == "" {
		return nil
	}
	var own []Entry
	for _, e := range entries {
		if e.Err == nil && e.Manifest.Owner == owner {
			own = append(own, e)
		}
	}
	counts := func(e Entry) bool {
		key := e.Manifest.key()
		return m.confirmed[key] && !m.left[key]
	}
	var gone []Entry
	kept := 0
	for _, e := range slices.Backward(own) {
		switch {
		case kept > 0 && kept < keep && counts(e):
			kept++
		case kept > 0:
			gone = append(gone, e)
		case counts(e):
			kept = 1
		}
	}
	return gone
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

// prune removes the checkpoints that Keep does not cover.
func (s *Store) prune() error {
	if s.o.Keep <= 0 {
		return nil // a scan of all checkpoints would take longer with each of them
	}
	entries, err := s.Dir().Scan()
	if err != nil {
		return fmt.Errorf("remove old checkpoints: %w", err)
	}
	return s.remove(expendable(entries, &s.marks, s.owner, s.o.Keep))
}

// Replace removes the checkpoints of other runs that have Options.Mark. After one success
// further calls do nothing, since nobody else writes into the folder.
func (s *Store) Replace() error {
	gone, err := s.others()
	if err != nil {
		return fmt.Errorf("remove replaced checkpoints: %w", err)
	}
	err = s.remove(gone)
	s.replaced = err == nil
	return err
}

// others lists the checkpoints of other runs that have Options.Mark, until Replace has removed
// them.
func (s *Store) others() (list []Entry, err error) {
	if s.o.Mark == "" || s.replaced {
		return nil, nil
	}
	entries, err := s.Dir().Scan()
	for _, e := range entries {
		if e.Err == nil && e.Manifest.Mark == s.o.Mark && e.Manifest.Owner != s.owner {
			list = append(list, e)
		}
	}
	return list, err
}

// remove first takes away the checkpoints' names, durably. A removal cut short by a kill or
// power loss thus leaves no incomplete checkpoint under a canonical name.
func (s *Store) remove(gone []Entry) error {
	var errs []error
	for _, e := range gone {
		st, err := s.f.Lstat(e.Name)
		if err == nil && st.Owner != s.user {
			continue // another user's, whatever its manifest says
		}
		temp := ""
		if err == nil {
			temp, err = s.working(gonePrefix + e.Name)
		}
		if err == nil {
			err = s.f.RenameNew(e.Name, temp)
		}
		if err == nil {
			err = s.f.Sync()
		}
		if err == nil {
			err = filesys.RemoveAll(s.f, temp)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("remove old checkpoint: %w", err))
		}
	}
	return errors.Join(errs...)
}
