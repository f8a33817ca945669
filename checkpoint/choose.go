package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// Choice is the checkpoint that stands for a folder: its newest whole one.
type Choice struct {
	Entry         // of the chosen one; Name is "" where the folder has none
	Passed []Pass // newer ones that were passed over, newest first
	Marks  Marks
	// Diverged says that a run diverged from it, as from every other whole one.
	Diverged bool
}

// Found tells whether there is a checkpoint.
func (c *Choice) Found() bool { return c.Name != "" }

// Pass is a checkpoint that was passed over, and why.
type Pass struct {
	Entry
	Why error
}

func (p Pass) String() string { return fmt.Sprintf("%s is passed over: %s", p.Name, reason(p.Why)) }

// reason is an error without what its kind repeats.
func reason(err error) string {
	return strings.Replace(err.Error(), ErrDamaged.Error()+": ", "", 1)
}

var errDiverged = errors.New("a run that went on from it became non-finite before its first update")

// Choose finds the newest whole checkpoint of dir that no run diverged from,
// verifying newest first; where runs diverged from every whole one, the newest of
// them. also, if not nil, may find a verified one damaged or refuse it. With names
// given, only those files are verified. Nothing is written, no lock is taken. An
// error wraps ErrDamaged where checkpoints are and none is whole,
// and ErrNewer where the newest whole one can't be read by this version.
func Choose(ctx context.Context, dir string, also func(Entry) error, only ...string) (Choice, error) {
	return ChooseBy(dir, func(e Entry) error {
		if _, err := Verify(ctx, e.Folder, only...); err != nil || also == nil {
			return err
		}
		return also(e)
	})
}

// ChooseBy is Choose with another way to find a checkpoint damaged or refuse it.
func ChooseBy(dir string, verify func(Entry) error) (Choice, error) {
	var c Choice
	for attempt := 0; ; attempt++ {
		entries, err := Scan(dir)
		if err != nil {
			return Choice{}, err
		}
		marks, err := ReadMarks(dir)
		if err != nil {
			return Choice{}, err
		}
		var moved bool
		c, moved, err = choose(entries, marks, verify)
		// A run beside us may have removed what we looked at, for newer ones.
		if !moved || attempt == 3 {
			return c, err
		}
	}
}

// choose is Choose over what is there; moved says that a checkpoint went away
// meanwhile.
func choose(entries []Entry, marks Marks, verify func(Entry) error) (c Choice, moved bool, err error) {
	c.Marks = marks
	var marked []Entry // whole, but diverged from; newest first
	for i := len(entries) - 1; i >= 0; i-- {
		e := entries[i]
		why := e.Err
		if why == nil {
			why = verify(e)
		}
		switch {
		case errors.Is(why, ErrNewer):
			return c, false, why
		case why != nil && !errors.Is(why, ErrDamaged):
			return c, false, why
		case why != nil:
			if _, err := filesys.Lstat(e.Folder); errors.Is(err, os.ErrNotExist) {
				moved = true
			}
		case marks.Diverged(e.Manifest):
			marked = append(marked, e)
			why = errDiverged
		default:
			c.Entry = e
			return c, moved, nil
		}
		c.Passed = append(c.Passed, Pass{e, why})
	}
	if len(marked) > 0 {
		c.Entry, c.Diverged = marked[0], true
		for i, p := range c.Passed {
			if p.Name == c.Name {
				c.Passed = c.Passed[:i]
				break
			}
		}
		return c, moved, nil
	}
	if len(c.Passed) == 0 {
		return c, moved, nil
	}
	whys := make([]string, len(c.Passed))
	for i, p := range c.Passed {
		whys[i] = p.Name + ": " + reason(p.Why)
	}
	return c, moved, fmt.Errorf("%w: none of %s is whole: %s", ErrDamaged, filepath.Dir(c.Passed[0].Folder), strings.Join(whys, "; "))
}

// Resolve returns the folder of one checkpoint or model: path itself, unless it is
// a checkpoint folder, which stands for its newest whole checkpoint (with passed
// telling of newer ones). The given files of a checkpoint are verified; with none
// given all are.
func Resolve(ctx context.Context, path string, only ...string) (folder string, passed []Pass, err error) {
	if st, err := filesys.Stat(path); err != nil || !st.IsDir() {
		return path, nil, nil // whoever opens it says what is wrong
	}
	if _, ok := Stat(path); ok { // a model's folder may have a manifest.json of another kind
		_, err := Verify(ctx, path, only...)
		if _, _, own := parseName(filepath.Base(path)); own && errors.Is(err, ErrDamaged) {
			err = fmt.Errorf("%w; %s in its place takes its newest whole checkpoint", err, filepath.Dir(path))
		}
		return path, nil, err
	}
	if _, err := filesys.Stat(filepath.Join(path, "config.json")); err == nil {
		return path, nil, nil
	}
	c, err := Choose(ctx, path, nil, only...)
	if err != nil || !c.Found() {
		return path, nil, err
	}
	return c.Folder, c.Passed, nil
}
