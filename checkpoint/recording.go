package checkpoint

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spillway-ml/spillway/internal/filesys"
)

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

// working records a temporary name in the marks before it is used. After a kill, the next process
// that opens the folder knows which leftovers it may remove.
func (s *Store) working(stem string) (name string, err error) {
	name = stem + "-" + random()
	return name, s.mark(mark{Event: markWorking, Name: name})
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
	s.long = max(longMarks, 2*s.marks.whole) // many checkpoints have many lines that still matter
	return s.f.Sync()
}
