package checkpoint

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// Scan is Dir.Scan for the folder at a path.
func Scan(dir string) ([]Entry, error) {
	d, err := OpenDir(filesys.System, dir)
	if err != nil {
		return nil, err
	}
	all, err := d.Scan()
	return all, errors.Join(err, d.Close())
}

// Scan returns the folder's checkpoints by ascending step and copy, damaged ones with their Err.
// Checkpoints of runs that another one replaces, but has not removed yet, come before all others.
// It reads only manifests and changes nothing.
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
	slices.Reverse(names) // newest first, before a run removes it
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

// Stat reports whether a folder is itself a checkpoint: by its canonical name, by a readable
// manifest, or by the remains of one (ranks' files, or a damaged manifest of ours).
func Stat(folder string) (Entry, bool) {
	abs, err := filepath.Abs(folder)
	if err != nil {
		return Entry{}, false
	}
	e := Entry{Name: filepath.Base(abs), Folder: folder}
	_, _, canonical := parseName(e.Name)
	if e.Manifest, e.Err = ReadManifest(folder); e.Err != nil && !canonical && !remains(folder) {
		return Entry{}, false
	}
	e.named()
	return e, true
}

// remains tells whether a folder without a readable manifest was a checkpoint. A model's folder
// may have an unrelated manifest.json.
func remains(folder string) bool {
	f, err := filesys.Open(folder)
	if err != nil {
		return false
	}
	defer f.Close()
	names, err := f.Names()
	if err != nil {
		return false
	}
	if slices.ContainsFunc(names, partName.MatchString) {
		return true
	}
	text, err := filesys.ReadFile(f, manifestName, maxManifest)
	return err == nil && bytes.Contains(text, []byte(sumKey)) && bytes.Contains(text, []byte(`"plan_hash"`))
}
