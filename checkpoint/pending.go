package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"time"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// Save writes a checkpoint of m.Step, all of whose parts are in this process, and returns its
// folder. The folder appears under its name complete and synced, or not at all. An existing
// name is never overwritten: the step's next free name is used. Non-finite values are a
// *NonFinite error.
func (s *Store) Save(ctx context.Context, m Manifest, parts []*Part, blobs []Blob) (string, error) {
	p, err := s.Begin(m)
	if err != nil {
		return "", err
	}
	var files []File
	for _, part := range parts {
		f, err := WritePart(ctx, p.Folder(), part)
		if err != nil {
			return "", p.Abort(err)
		}
		files = append(files, f)
	}
	e, err := p.Finish(files, blobs)
	if err != nil {
		return "", err
	}
	s.Adopt(e)
	return e.Folder, nil
}

// Pending is a checkpoint that is being written. Any process may write its ranks' files into
// Folder; Finish then gives it its name. One goroutine may call its methods concurrently with
// those of the Store.
type Pending struct {
	in   filesys.Folder // the checkpoint folder
	name string         // of the folder that is written
	f    filesys.Folder
	m    Manifest
}

// Begin starts a checkpoint of m.Step. m also has the Tensors, the Run and the informational
// fields.
func (s *Store) Begin(m Manifest) (*Pending, error) {
	now := time.Now().UTC().Truncate(time.Second)
	m.ID, m.Owner, m.Mark, m.Written = random(), s.owner, s.o.Mark, &now
	others, err := s.others()
	if err != nil {
		return nil, fmt.Errorf("save checkpoint of step %d in %s: %w", m.Step, s.f.Path(), err)
	}
	for _, e := range others {
		if !slices.Contains(m.Replaces, e.Manifest.Owner) {
			m.Replaces = append(m.Replaces, e.Manifest.Owner)
		}
	}
	return s.begin(m)
}

func (s *Store) begin(m Manifest) (*Pending, error) {
	p := &Pending{m: m}
	err := s.stillOurs()
	if err == nil {
		err = s.shorten()
	}
	p.in = s.f
	if err == nil {
		p.name, err = s.working(tempPrefix + Name(m.Step, 1))
	}
	if err == nil {
		err = s.f.Mkdir(p.name, 0o777)
	}
	if err == nil {
		p.f, err = s.Dir().writing(p.name, s.user)
	}
	if err != nil {
		return nil, p.failed(err)
	}
	return p, nil
}

func (p *Pending) failed(err error) error {
	return fmt.Errorf("save checkpoint of step %d in %s: %w", p.m.Step, p.in.Path(), err)
}

// Folder returns the folder in which the ranks' files are written.
func (p *Pending) Folder() filesys.Folder { return p.f }

// Name returns the folder's temporary name in the checkpoint folder: see Joined.Writing.
func (p *Pending) Name() string { return p.name }

// Finish writes the rest of the checkpoint, makes it durable and gives it its name.
func (p *Pending) Finish(parts []File, blobs []Blob) (Entry, error) {
	m, err := writeRest(p.f, p.m, parts, blobs)
	var e Entry
	if err == nil {
		e, err = p.commit(m)
	}
	if err != nil {
		return e, p.Abort(err)
	}
	return e, p.f.Close()
}

// Abort removes the written files after the failure err, and returns err as the error of the
// save.
func (p *Pending) Abort(err error) error {
	return p.failed(errors.Join(err, p.f.Close(), filesys.RemoveAll(p.in, p.name)))
}

// commit gives a complete folder the first free name of its step.
func (p *Pending) commit(m Manifest) (Entry, error) {
	e := Entry{Step: m.Step, Copy: 1, Manifest: m}
	for ; ; e.Copy++ {
		e.Name = Name(e.Step, e.Copy)
		e.Folder = filepath.Join(p.in.Path(), e.Name)
		_, err := p.in.Lstat(e.Name)
		if errors.Is(err, fs.ErrNotExist) {
			err = p.in.RenameNew(p.name, e.Name)
			if err == nil {
				return e, errors.Join(p.named(e.Name), p.in.Sync())
			}
		}
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return e, err
		}
	}
}

// named checks that a name still refers to the folder that was written. Anyone with write
// access beside it may have replaced it.
func (p *Pending) named(name string) error {
	ours, err := p.f.Info()
	if err != nil {
		return err
	}
	now, err := p.in.Lstat(name)
	if err == nil && !filesys.Same(ours, now) {
		err = fmt.Errorf("%s is not the folder that this run has written: somebody has put another in its place", filepath.Join(p.in.Path(), name))
	}
	return err
}
