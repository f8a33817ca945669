package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// Choice is the checkpoint that is used when a checkpoint folder is named: its newest complete one.
type Choice struct {
	Entry         // the chosen one; Name is "" if the folder has none
	Passed []Pass // newer ones that were passed over, newest first
	Marks  Marks
	// Diverged says that a run diverged from the chosen checkpoint, as from every other complete
	// one.
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

// reason returns the text of an error without the prefix of its kind (ErrDamaged).
func reason(err error) string {
	return strings.Replace(err.Error(), ErrDamaged.Error()+": ", "", 1)
}

var errDiverged = errors.New("a run that went on from it became non-finite before its first update")

// Choose finds the newest complete checkpoint of dir that no run diverged from, verifying newest
// first. If runs diverged from every complete one, it returns the newest of them. also, if not nil,
// may reject a verified one as damaged or refuse it. With names given, only those files are
// verified. Choose writes nothing and takes no lock. The error wraps ErrDamaged if there are
// checkpoints but none is complete, and ErrNewer if this version can't read the newest complete
// one.
func Choose(ctx context.Context, dir string, also func(*Checkpoint) error, only ...string) (Choice, error) {
	d, err := OpenDir(filesys.System, dir)
	if err != nil {
		return Choice{}, err
	}
	c, err := d.Choose(ctx, also, only...)
	return c, errors.Join(err, d.Close())
}

// Choose is the function Choose for an open folder.
func (d Dir) Choose(ctx context.Context, also func(*Checkpoint) error, only ...string) (Choice, error) {
	return d.ChooseBy(func(e *Checkpoint) error {
		if err := e.Verify(ctx, only...); err != nil || also == nil {
			return err
		}
		return also(e)
	})
}

// ChooseBy is Choose with verify in place of Verify: its error says that a checkpoint is
// damaged or refused.
func (d Dir) ChooseBy(verify func(*Checkpoint) error) (Choice, error) {
	c, open, err := d.take(verify)
	if open != nil {
		err = errors.Join(err, open.Close())
	}
	return c, err
}

// patience is how long a reader repeats its look while a concurrent run removes every checkpoint
// before it can be opened.
const patience = 2 * time.Second

// look calls read with the checkpoints of the folder, the newest of them open, and repeats
// until read is done. A listing may miss every name that a run changes meanwhile, so an empty
// listing is repeated: three in a row count as an empty folder.
func (d Dir) look(read func(entries []Entry, open held) (done bool, err error)) error {
	late := time.Now().Add(patience)
	for n := 1; ; n++ {
		open, done := held{}, false
		entries, moved, err := d.scan(open)
		if err == nil && (len(entries) > 0 || !moved && n >= 3) {
			done, err = read(entries, open)
		}
		err = errors.Join(err, open.close())
		if done || err != nil {
			return err
		}
		if time.Now().After(late) {
			return fmt.Errorf("%s is busy: for %v a run has removed every checkpoint there before it could be opened; try again", d.f.Path(), patience)
		}
		time.Sleep(time.Millisecond)
	}
}

// Each opens the checkpoint that path names (alone), or all checkpoints of a checkpoint folder
// in Scan's order. do gets each with all its files open, or nil if it can't be opened; its
// Entry says why. A checkpoint that a run removes meanwhile is left out. marks say which of the
// folder's checkpoints are confirmed, or diverged.
func Each(o filesys.Opener, path string, do func(Entry, *Checkpoint) error) (marks Marks, alone bool, err error) {
	dir := path
	e, alone := Stat(path)
	if alone {
		c, err := openPath(o, path)
		if errors.Is(err, fs.ErrNotExist) {
			return Marks{}, true, err
		}
		if e.Err = err; err == nil {
			e = c.Entry
		}
		if err := handOn(e, c, do); err != nil {
			return Marks{}, true, err
		}
		dir = filepath.Dir(filepath.Clean(path))
	}
	d, err := OpenDir(o, dir)
	if err != nil {
		return Marks{}, alone, err
	}
	if !alone && d.f != nil {
		err = d.look(func(entries []Entry, open held) (done bool, err error) {
			done = len(entries) == 0
			for _, e := range entries {
				var c *Checkpoint
				if e.Err == nil {
					c, e.Err = open.open(d, e.Name)
				}
				if errors.Is(e.Err, fs.ErrNotExist) {
					continue
				}
				if err := handOn(e, c, do); err != nil {
					return false, err
				}
				done = true
			}
			return done, nil
		})
	}
	if err == nil {
		marks, err = d.Marks()
	}
	return marks, alone, errors.Join(err, d.Close())
}

// handOn calls do with a checkpoint and closes it.
func handOn(e Entry, c *Checkpoint, do func(Entry, *Checkpoint) error) error {
	err := do(e, c)
	if c != nil {
		err = errors.Join(err, c.Close())
	}
	return err
}

// take is ChooseBy that leaves the chosen checkpoint open; nil if there is none.
func (d Dir) take(verify func(*Checkpoint) error) (Choice, *Checkpoint, error) {
	if d.f == nil {
		return Choice{Marks: parseMarks("", strings.NewReader(""))}, nil, nil
	}
	var c Choice
	var open *Checkpoint
	err := d.look(func(entries []Entry, newest held) (bool, error) {
		marks, err := d.Marks()
		if err != nil {
			return false, err
		}
		moved := false
		if c, open, moved, err = d.choose(entries, newest, marks, verify); open == nil && moved {
			return false, nil
		}
		return true, err
	})
	return c, open, err
}

// choose picks from the scanned entries, as take does. moved says that a checkpoint was removed
// meanwhile.
func (d Dir) choose(entries []Entry, newest held, marks Marks, verify func(*Checkpoint) error) (c Choice, chosen *Checkpoint, moved bool, err error) {
	c.Marks = marks
	var marked *Checkpoint // the newest whole one, if runs diverged from it
	defer func() {
		if marked != nil && marked != chosen {
			err = errors.Join(err, marked.Close())
		}
	}()
	for _, e := range slices.Backward(entries) {
		why := e.Err
		var open *Checkpoint
		if why == nil {
			if open, why = newest.open(d, e.Name); why == nil {
				why = verify(open)
			}
		}
		if why == nil && !marks.Diverged(e.Manifest) {
			c.Entry = e
			return c, open, moved, nil
		}
		if why == nil {
			why = errDiverged
			if marked == nil {
				marked, open = open, nil
			}
		} else if errors.Is(why, fs.ErrNotExist) || open != nil && errors.Is(why, ErrDamaged) && d.gone(e.Name, open.f) {
			moved, why = true, nil
		}
		if open != nil {
			if cerr := open.Close(); cerr != nil && why == nil {
				why = cerr
			}
		}
		switch {
		case why == nil:
		case errors.Is(why, ErrDamaged), errors.Is(why, errDiverged), errors.Is(why, filesys.ErrLeads):
			c.Passed = append(c.Passed, Pass{e, why})
		default:
			return c, nil, false, why
		}
	}
	if marked != nil {
		c.Entry, c.Diverged = marked.Entry, true
		i := slices.IndexFunc(c.Passed, func(p Pass) bool { return p.Name == c.Name })
		c.Passed = c.Passed[:i]
		return c, marked, moved, nil
	}
	if len(c.Passed) == 0 {
		return c, nil, moved, nil
	}
	whys := make([]string, len(c.Passed))
	for i, p := range c.Passed {
		whys[i] = p.Name + ": " + reason(p.Why)
	}
	return c, nil, moved, fmt.Errorf("%w: none of %s is whole: %s", ErrDamaged, d.f.Path(), strings.Join(whys, "; "))
}

// Take opens the checkpoint that path names, or the newest complete one of a checkpoint folder;
// passed lists newer ones that were passed over. Only the given files are verified; without names
// all are. c is nil if path is a model's folder or neither kind of folder.
func Take(ctx context.Context, o filesys.Opener, path string, only ...string) (c *Checkpoint, passed []Pass, err error) {
	if st, err := os.Stat(path); err != nil || !st.IsDir() {
		return nil, nil, nil // opening the path reports the error
	}
	if _, ok := Stat(path); ok { // a model's folder may have a manifest.json of another kind
		c, err := openPath(o, path)
		if err == nil {
			if err = c.Verify(ctx, only...); err == nil {
				return c, nil, nil
			}
			err = errors.Join(err, c.Close())
		}
		if _, _, own := parseName(filepath.Base(path)); own && errors.Is(err, ErrDamaged) {
			err = fmt.Errorf("%w; give %s, which stands for its newest whole checkpoint", err, filepath.Dir(path))
		}
		return nil, nil, err
	}
	if _, err := os.Stat(filepath.Join(path, "config.json")); err == nil {
		return nil, nil, nil
	}
	d, err := OpenDir(o, path)
	if err != nil {
		return nil, nil, err
	}
	chosen, c, err := d.take(func(e *Checkpoint) error { return e.Verify(ctx, only...) })
	return c, chosen.Passed, errors.Join(err, d.Close())
}
