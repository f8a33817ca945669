package checkpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/spillway-ml/spillway/internal/filesys"
)

// Reshard rewrites the files of a checkpoint as the given number of ranks would have written
// them. The states stay the same, byte for byte, and any number of ranks can still load them.
// It returns the checkpoint's folder and the newer ones that were passed over. The new folder
// takes the old one's name once it is complete and durable. A whole checkpoint of the step
// exists at any moment, briefly under the step's next name. Blobs, the run record and the
// folder's marks stay. The checkpoint folder is locked before a checkpoint is chosen; if a run
// has it open, the error is *Busy. The checkpoint must be of the present version.
func Reshard(ctx context.Context, o filesys.Opener, path string, ranks int) (folder string, passed []Pass, err error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", nil, err
	}
	dir, name := abs, ""
	_, _, alone := parseName(filepath.Base(abs))
	if !alone {
		_, alone = Stat(abs)
	}
	if alone {
		dir, name = filepath.Split(abs)
	}
	s, err := Open(filepath.Clean(dir), Options{Folders: o})
	if err != nil {
		return "", nil, fmt.Errorf("reshard %s: %w", path, err)
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	var c *Checkpoint
	if alone {
		if c, err = s.Dir().Open(name); err == nil {
			err = c.Verify(ctx)
		}
	} else {
		var choice Choice
		choice, c, err = s.Dir().take(func(c *Checkpoint) error { return c.Verify(ctx) })
		passed = choice.Passed
		if err == nil && c == nil {
			err = fmt.Errorf("reshard: %s holds no checkpoint", path)
		}
	}
	if c != nil {
		folder = c.Folder
		if err == nil {
			err = s.reshard(ctx, c, ranks)
		}
		err = errors.Join(err, c.Close())
	}
	return folder, passed, err
}

func (s *Store) reshard(ctx context.Context, c *Checkpoint, ranks int) error {
	m := c.Manifest
	if m.Version < sharded {
		return fmt.Errorf("reshard %s: it is of version %d, whose files hold whole tensors; a run that resumes from it writes a file for each rank", c.Folder, m.Version)
	}
	var blobs []Blob
	for _, f := range m.Files {
		if f.Header > 0 {
			continue
		}
		data, err := c.Read(f.Name)
		if err != nil {
			return err
		}
		blobs = append(blobs, Blob{f.Name, data})
	}
	m.Ranks = ranks
	p, err := s.begin(m)
	if err != nil {
		return err
	}
	files, err := c.rewrite(ctx, p.Folder(), ranks)
	if err != nil {
		return p.Abort(err)
	}
	e, err := p.Finish(files, blobs)
	if err != nil {
		return err
	}
	s.wrote = true
	if err := s.remove([]Entry{c.Entry}); err != nil {
		return err
	}
	if err := s.f.RenameNew(e.Name, c.Name); err != nil {
		return err
	}
	return s.f.Sync()
}

// rewrite copies the extents of a checkpoint's files into new files for the given number of
// ranks.
func (c *Checkpoint) rewrite(ctx context.Context, to filesys.Folder, ranks int) ([]File, error) {
	s, err := c.States()
	if err != nil {
		return nil, err
	}
	var files []File
	for i, share := range s.split(ranks) {
		p := &Part{Index: i, Of: ranks}
		for _, e := range share {
			p.Extents = append(p.Extents, e.Extent)
		}
		at, b := -1, make([]byte, ExtentBytes)
		p.Read = func(i int, off int64, dst []byte) error {
			e := share[i]
			if at != i {
				if err := s.raw(e, b[:e.Bytes()]); err != nil {
					return err
				}
				at = i
			}
			copy(dst, b[off:e.Bytes()])
			return nil
		}
		f, err := WritePart(ctx, to, p)
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	return files, nil
}

// split divides the extents evenly among ranks, in tensor order, larger element sizes first.
func (s *States) split(ranks int) [][]*located {
	var all []*located
	total := int64(0)
	for _, tensors := range s.extents {
		for _, list := range tensors {
			for i := range list {
				all = append(all, &list[i])
				total += list[i].Bytes()
			}
		}
	}
	slices.SortFunc(all, func(a, b *located) int {
		return cmp.Or(cmp.Compare(a.Tensor, b.Tensor), cmp.Compare(a.State, b.State), cmp.Compare(a.Start, b.Start))
	})
	shares, done := make([][]*located, ranks), int64(0)
	for _, e := range all {
		i := min(int(float64(done)/float64(total)*float64(ranks)), ranks-1)
		shares[i] = append(shares[i], e)
		done += e.Bytes()
	}
	for _, share := range shares {
		slices.SortStableFunc(share, func(a, b *located) int { return int(b.DType.Size() - a.DType.Size()) })
	}
	return shares
}
