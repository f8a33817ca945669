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
// The bytes of one checkpoint are extent.go and part.go (a rank's file), write.go and manifest.go
// (the rest), states.go and load.go (reading), and verify.go. dir.go and scan.go
// find the checkpoints of a folder. The rules over many do not depend on those bytes: who may
// write (store.go, lock.go), how one gets its name (pending.go), which are removed (prune.go),
// which one a run resumes from (choose.go), and the record of events (marks.go, recording.go).
//
// A folder with a canonical name and a readable manifest is a checkpoint. A canonical name without
// a readable manifest is a damaged checkpoint: it is reported and passed over, never removed or
// overwritten. All other files in the folder belong to somebody else.
package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"

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

// agrees compares the name with the manifest: a renamed folder is no checkpoint
// of the step that it is named after.
func (e *Entry) agrees() error {
	if e.Manifest.Step != e.Step {
		return fmt.Errorf("%w: %s says step %d in its manifest", ErrDamaged, e.Folder, e.Manifest.Step)
	}
	return nil
}

// named fills in the fields that follow from the checkpoint's name, and compares the name with
// the manifest.
func (e *Entry) named() {
	var canonical bool
	if e.Step, e.Copy, canonical = parseName(e.Name); !canonical {
		e.Step, e.Copy = e.Manifest.Step, 1
	} else if e.Err == nil {
		e.Err = e.agrees()
	}
}

// Checkpoint is an open checkpoint. All files that its manifest lists are opened with it, so
// they can be read even after their names are removed.
type Checkpoint struct {
	Entry
	f     filesys.Folder
	files map[string]opened
}

// opened is an open file, or the error of opening it.
type opened struct {
	filesys.File
	err error
}

// openCheckpoint opens a checkpoint in f. It takes ownership of f unless it fails.
func openCheckpoint(f filesys.Folder, name string) (*Checkpoint, error) {
	c := &Checkpoint{Entry: Entry{Name: name, Folder: f.Path()}, f: f, files: map[string]opened{}}
	if c.Manifest, c.Err = readManifest(f); c.Err == nil {
		c.named()
	}
	if c.Err != nil {
		return nil, c.Err
	}
	for _, want := range c.Manifest.Files {
		var o opened
		o.File, o.err = filesys.OpenRegular(f, want.Name)
		c.files[want.Name] = o
	}
	return c, nil
}

// lacks tells whether a listed file was missing.
func (c *Checkpoint) lacks() bool {
	for _, o := range c.files {
		if errors.Is(o.err, fs.ErrNotExist) {
			return true
		}
	}
	return false
}

// Close closes the files.
func (c *Checkpoint) Close() error {
	errs := []error{c.f.Close()}
	for _, o := range c.files {
		if o.err == nil {
			errs = append(errs, o.Close())
		}
	}
	c.files = nil
	return errors.Join(errs...)
}

// file returns an open file after checking that it has the size in the manifest.
func (c *Checkpoint) file(want File) (filesys.File, error) {
	path := filepath.Join(c.Folder, want.Name)
	o := c.files[want.Name]
	if errors.Is(o.err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %s is missing", ErrDamaged, path)
	}
	if o.err != nil {
		return nil, faulty(o.err)
	}
	st, err := o.Stat()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	if st.Size != want.Bytes {
		return nil, fmt.Errorf("%w: %s has %d bytes; the manifest says %d", ErrDamaged, path, st.Size, want.Bytes)
	}
	return o, nil
}

// Read returns the contents of a small file of the checkpoint after comparing them with its
// checksum. The error is fs.ErrNotExist if the manifest lists no such file.
func (c *Checkpoint) Read(name string) ([]byte, error) {
	want, ok := c.Manifest.file(name)
	if !ok {
		return nil, fmt.Errorf("read %s: %w", filepath.Join(c.Folder, name), fs.ErrNotExist)
	}
	text, err := c.Bytes(want)
	if err != nil {
		return nil, err
	}
	if want.Header == 0 && sum(text) != want.CRC32C {
		return nil, fmt.Errorf("%w: %s has CRC-32C %s; the manifest says %s", ErrDamaged, filepath.Join(c.Folder, name), sum(text), want.CRC32C)
	}
	return text, nil
}

// Bytes returns a file's contents. Only its size is compared with the manifest.
func (c *Checkpoint) Bytes(want File) ([]byte, error) {
	f, err := c.file(want)
	if err != nil {
		return nil, err
	}
	text := make([]byte, want.Bytes)
	if _, err := io.ReadFull(io.NewSectionReader(f, 0, want.Bytes), text); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrDamaged, f.Name(), err)
	}
	return text, nil
}
