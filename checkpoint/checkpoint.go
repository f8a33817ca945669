// Package checkpoint writes, finds and prunes checkpoints: folders named step-N inside a
// checkpoint folder. Each rank writes one file with the extents that it holds. An extent
// carries its parameter's logical name and element range, never a ZeRO stage or a flat offset,
// so any number of ranks at any stage can load it.
//
//	DIR/step-00000100/
//	    config.json                        the model, in Hugging Face's form
//	    rank-00000-of-00004.safetensors …  what that rank held of parameters (state
//	                                       "model") and optimizer states, see Part
//	    manifest.json                      step, run, tensors, and the files' sizes and sums
//	DIR/.spillway-marks         what a Store remembers beside the checkpoints
//	DIR/.spillway-lock          the process that may write here, while there is one
//
// A checkpoint is written aside under an unguessable name, synced and renamed.
//
// The bytes of one checkpoint are part.go and out.go (a rank's file), write.go and
// manifest.go (the rest), states.go and load.go (reading), and verify.go. The rules
// over many, which do not depend on those bytes: who may write (store.go,
// lock.go), which are removed (prune.go), which one a run goes on from
// (choose.go), what is remembered (marks.go).
//
// What is ours: a canonical name with a readable manifest. A canonical name
// without one is a damaged checkpoint: named, passed over, never removed or
// written over. All else in the folder belongs to somebody else.
package checkpoint

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// Entry is a checkpoint of a folder, by its canonical name.
type Entry struct {
	Name     string // step-00000100
	Folder   string // its path
	Step     int    // of the name
	Copy     int    // 1, or the number after the dot
	Manifest Manifest
	Err      error // why the manifest can't be used; wraps ErrDamaged or ErrNewer
}

// Scan is Dir.Scan of the folder at a path.
func Scan(dir string) ([]Entry, error) {
	d, err := OpenDir(filesys.System, dir)
	if err != nil {
		return nil, err
	}
	all, err := d.Scan()
	return all, errors.Join(err, d.Close())
}

// Scan returns the folder's checkpoints by ascending step and copy, damaged ones
// with their Err; before all others come those of runs that another one replaces and
// has not removed yet. It looks at manifests only and changes nothing.
func (d Dir) Scan() ([]Entry, error) {
	all, _, err := d.scan(nil)
	return all, err
}

// held maps names to checkpoints that scan has left open.
type held map[string]*Checkpoint

// mostHeld bounds the checkpoints that scan leaves open, the newest ones. A concurrent run that
// keeps few checkpoints may remove any of them at any moment.
const mostHeld = 3

// open returns the checkpoint that is already open, or opens it with Dir.Open.
func (h held) open(d Dir, name string) (*Checkpoint, error) {
	if c := h[name]; c != nil {
		delete(h, name)
		return c, nil
	}
	return d.Open(name)
}

func (h held) close() error {
	var errs []error
	for _, c := range h {
		errs = append(errs, c.Close())
	}
	clear(h)
	return errors.Join(errs...)
}

// scan is Scan that leaves the newest checkpoints open in open, unless that is nil. moved says
// that another process removed a checkpoint during the scan.
func (d Dir) scan(open held) (all []Entry, moved bool, err error) {
	if d.f == nil {
		return nil, false, nil
	}
	names, err := d.f.Names()
	if err != nil {
		return nil, false, fmt.Errorf("list checkpoints: %w", err)
	}
	slices.Reverse(names) // the newest first, before it goes
	for _, name := range names {
		step, copy, ok := parseName(name)
		if !ok {
			continue
		}
		e := Entry{Name: name, Folder: filepath.Join(d.f.Path(), name), Step: step, Copy: copy}
		if open != nil && len(open) < mostHeld {
			var c *Checkpoint
			if c, e.Err = d.Open(name); e.Err == nil {
				open[name], e.Manifest = c, c.Manifest
			}
		} else {
			e.Manifest, e.Err = d.manifest(name)
		}
		if errors.Is(e.Err, fs.ErrNotExist) {
			moved = true // its owner removed it meanwhile
			continue
		}
		if e.Err == nil {
			e.Err = e.agrees()
		}
		all = append(all, e)
	}
	replaced := map[string]bool{}
	for _, e := range all {
		for _, owner := range e.Manifest.Replaces {
			replaced[owner] = e.Err == nil || replaced[owner]
		}
	}
	stays := func(e Entry) int {
		if e.Err == nil && e.Manifest.Mark != "" && replaced[e.Manifest.Owner] {
			return 0
		}
		return 1
	}
	slices.SortFunc(all, func(a, b Entry) int { return cmp.Or(cmp.Compare(stays(a), stays(b)), compare(a, b)) })
	return all, moved, nil
}

// manifest reads the manifest of the named checkpoint; fs.ErrNotExist if it no longer exists.
func (d Dir) manifest(name string) (Manifest, error) {
	f, err := d.f.Sub(name)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, filesys.ErrLeads) {
		return Manifest{}, err
	}
	if err != nil {
		return Manifest{}, missing(filepath.Join(d.f.Path(), name), err)
	}
	m, err := readManifest(f)
	if err != nil && d.gone(name, f) {
		err = fs.ErrNotExist
	}
	return m, errors.Join(err, f.Close())
}

// agrees compares the name with the manifest: a renamed folder is no checkpoint
// of the step that it is named after.
func (e *Entry) agrees() error {
	if e.Manifest.Step != e.Step {
		return fmt.Errorf("%w: %s says step %d in its manifest", ErrDamaged, e.Folder, e.Manifest.Step)
	}
	return nil
}

func compare(a, b Entry) int { return cmp.Or(cmp.Compare(a.Step, b.Step), cmp.Compare(a.Copy, b.Copy)) }

// List returns the folders of dir's checkpoints whose manifest is readable, by
// ascending step.
func List(dir string) ([]string, error) {
	all, err := Scan(dir)
	var folders []string
	for _, e := range all {
		if e.Err == nil {
			folders = append(folders, e.Folder)
		}
	}
	return folders, err
}
