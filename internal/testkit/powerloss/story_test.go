package powerloss

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/checkpoint"
	"github.com/spillway-ml/spillway/internal/filesys"
	"github.com/spillway-ml/spillway/internal/testkit/folders"
	"github.com/spillway-ml/spillway/train"
)

var background = context.Background()

// tiny is a run on a model of some thousand parameters, whose files are in dir.
func tiny(dir string) (spillway.Config, error) {
	c := spillway.Default()
	c.Model, c.Data, c.Order = filepath.Join(dir, "model"), filepath.Join(dir, "text.txt"), "sequential"
	c.Batch, c.Seq, c.Steps, c.Keep = 1, 8, 100, 2
	if _, err := os.Stat(c.Model); err == nil {
		return c, nil
	}
	config := `{"model_type":"gpt2","n_layer":1,"n_head":1,"n_embd":8,"vocab_size":256,"n_positions":8}`
	words := strings.Repeat("what was saved is there after a loss of power; ", 50)
	return c, errors.Join(os.Mkdir(c.Model, 0o755), os.WriteFile(filepath.Join(c.Model, "config.json"), []byte(config), 0o644), os.WriteFile(c.Data, []byte(words), 0o644))
}

func small(t testing.TB, dir string) spillway.Config {
	t.Helper()
	c, err := tiny(dir)
	require.NoError(t, err)
	return c
}

// phase is what a loss of power may leave for a resume to find, by name.
type phase struct{ may map[string]bool }

// story is a run over several processes' lives, all of whose file operations are
// logged.
type story struct {
	t    *testing.T
	rec  *folders.Record
	base string // the folder that is logged
	ck   string // of the checkpoints, in it
	now  *phase
	disk filesys.Opener      // the logged one
	bits map[string][]string // of each checkpoint that there was, by name; several where it was resharded
	// whole is what checkpoint.Verify said of bits.
	whole map[string]error
}

// during does something after which the newest checkpoint may be another one, and
// then is: from then on it is acknowledged.
func (s *story) during(do func()) {
	open := &phase{maps.Clone(s.now.may)}
	s.rec.Note(open)
	do()
	c, err := s.dir(s.disk).Choose(background, nil)
	require.NoError(s.t, err)
	open.may[c.Name] = true
	s.now = &phase{map[string]bool{c.Name: true}}
	s.rec.Note(s.now)
	if c.Found() {
		got, err := bitsOf(s.dir(s.disk), c.Name)
		require.NoError(s.t, err)
		s.bits[c.Name] = append(s.bits[c.Name], got)
	}
}

// reshard rewrites the newest checkpoint's files. Until that is done a resume may find
// it under the next name of its step.
func (s *story) reshard(ranks int) {
	c, err := s.dir(s.disk).Choose(background, nil)
	require.NoError(s.t, err)
	aside := c.Name + ".2"
	s.rec.Note(&phase{map[string]bool{c.Name: true, aside: true}})
	_, _, err = checkpoint.Reshard(background, s.disk, c.Folder, ranks)
	require.NoError(s.t, err)
	got, err := bitsOf(s.dir(s.disk), c.Name)
	require.NoError(s.t, err)
	require.NotContains(s.t, s.bits[c.Name], got)
	s.bits[c.Name], s.bits[aside] = append(s.bits[c.Name], got), []string{got}
	s.rec.Note(s.now)
}

// bitsOf is the sum of a checkpoint's files, names among them.
func bitsOf(d checkpoint.Dir, name string) (string, error) {
	c, err := d.Open(name)
	if err != nil {
		return "", err
	}
	got, err := bits(c)
	return got, errors.Join(err, c.Close())
}

func bits(c *checkpoint.Checkpoint) (string, error) {
	h := sha256.New()
	for _, f := range c.Manifest.Files {
		text, err := c.Bytes(f)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(h, "%s %d\n%s", f.Name, len(text), text)
	}
	fmt.Fprint(h, c.Manifest.CRC32C)
	return hex.EncodeToString(h.Sum(nil)), nil
}

// dir is the checkpoint folder, or an empty one.
func (s *story) dir(disk filesys.Opener) checkpoint.Dir {
	d, err := checkpoint.OpenDir(disk, s.ck)
	if err != nil {
		panic(err)
	}
	return d
}

// open starts the run, or goes on with it.
func (s *story) open(c spillway.Config) *spillway.Trainer {
	var tr *spillway.Trainer
	s.during(func() {
		var err error
		tr, err = train.NewIn(background, c, s.disk)
		require.NoError(s.t, err)
	})
	return tr
}

// step trains one step and saves.
func (s *story) step(tr *spillway.Trainer) {
	s.during(func() {
		_, err := tr.Step(background)
		require.NoError(s.t, err)
		_, err = tr.Save(context.Background())
		require.NoError(s.t, err)
	})
}

func (s *story) close(tr *spillway.Trainer) { s.during(func() { require.NoError(s.t, tr.Close()) }) }

// tell runs the whole story: it saves and prunes, is resharded and resumed, diverges, is resumed
// before the divergence, and is interrupted.
func tell(t *testing.T) *story {
	top := t.TempDir()
	c := small(t, top)
	s := &story{t: t, base: filepath.Join(top, "disk"), now: &phase{map[string]bool{"": true}}, bits: map[string][]string{}, whole: map[string]error{}}
	require.NoError(t, os.Mkdir(s.base, 0o755))
	s.ck = filepath.Join(s.base, "runs", "ck")
	root, err := filesys.Open(s.base)
	require.NoError(t, err)
	t.Cleanup(func() { _ = root.Close() })
	s.rec = folders.NewRecord(root, true)
	s.disk = folders.At(s.rec.Folder())
	c.Checkpoint, c.Ranks, c.Zero = s.ck, 2, 3

	tr := s.open(c)
	for range 3 {
		s.step(tr)
	}
	s.close(tr)
	s.reshard(3)

	c.Resume = true
	c.LR = 1e30
	tr = s.open(c)
	s.step(tr) // finite still, and lost already
	s.during(func() {
		_, err := tr.Step(background)
		var d *spillway.Diverged
		require.ErrorAs(t, err, &d)
	})
	s.close(tr)
	require.Equal(t, map[string]bool{"step-00000003": true}, s.now.may, "the divergence's checkpoint is passed over")

	c.LR = spillway.Default().LR
	tr = s.open(c)
	s.step(tr)
	_, err = tr.Step(background)
	require.NoError(t, err)
	s.during(func() { // interrupted between steps
		ctx, cancel := context.WithCancel(background)
		cancel()
		require.ErrorIs(t, tr.Run(ctx, nil), context.Canceled)
	})
	s.close(tr)
	require.Equal(t, map[string]bool{"step-00000005": true}, s.now.may)
	require.Contains(t, s.bits, "step-00000004.2")
	return s
}

// holds sees that a state has what it must have, and that a run can go on from it.
func (s *story) holds(st folders.State) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v", r)
		}
	}()
	disk := folders.At(st.Files.Folder())
	may := map[string]bool{"": true}
	if p, ok := st.Note.(*phase); ok {
		may = p.may
	}
	chosen, err := s.chosen(disk, may)
	if err != nil {
		return err
	}
	if err := s.goesOn(disk, chosen); err != nil {
		return fmt.Errorf("going on from %q: %w", chosen.Name, err)
	}
	return nil
}

// chosen is what a resume finds: it must be one of may, with the bits it was saved
// with, and nothing damaged may bear a checkpoint's name.
func (s *story) chosen(disk filesys.Opener, may map[string]bool) (checkpoint.Choice, error) {
	d, err := checkpoint.OpenDir(disk, s.ck)
	if err != nil {
		return checkpoint.Choice{}, err
	}
	c, err := d.ChooseBy(s.verify)
	if err != nil {
		return c, err
	}
	if !may[c.Name] {
		return c, fmt.Errorf("a resume finds %q, want one of %q", c.Name, slices.Sorted(maps.Keys(may)))
	}
	all, err := d.Scan()
	if err != nil {
		return c, err
	}
	for _, e := range all {
		if e.Err != nil {
			return c, e.Err
		}
		open, err := d.Open(e.Name)
		if err == nil {
			err = errors.Join(s.verify(open), open.Close())
		}
		if err != nil {
			return c, err
		}
	}
	return c, nil
}

// verify is checkpoint.Verify, once for the same bits. A checkpoint that was
// acknowledged must have those that it was saved with.
func (s *story) verify(e *checkpoint.Checkpoint) error {
	got, err := bits(e)
	if err != nil {
		return err
	}
	err, known := s.whole[got]
	if !known {
		err = e.Verify(background)
		s.whole[got] = err
	}
	if want, ok := s.bits[e.Name]; ok && err == nil && !slices.Contains(want, got) {
		return fmt.Errorf("%s has other bits than were saved, which its checksums do not show", e.Name)
	}
	return err
}

// goesOn opens the folder as a resumed run does, saves one more, and sees that
// nothing but checkpoints and the store's own files is left.
func (s *story) goesOn(disk filesys.Opener, c checkpoint.Choice) error {
	store, err := checkpoint.Open(s.ck, checkpoint.Options{Keep: 2, Folders: disk})
	if err != nil {
		return err
	}
	if c.Found() {
		if err := store.Continue(c); err != nil {
			return err
		}
	}
	part := &checkpoint.Part{Of: 1, Read: func(int, int64, []byte) error { return nil }}
	folder, err := store.Save(background, checkpoint.Manifest{Step: 1000}, []*checkpoint.Part{part}, []checkpoint.Blob{{Name: "x", Data: []byte("x")}})
	if err == nil {
		err = store.Confirm()
	}
	if err := errors.Join(err, store.Close()); err != nil {
		return err
	}
	if next, err := s.dir(disk).ChooseBy(s.verify); err != nil || next.Folder != folder {
		return fmt.Errorf("after one more save a resume finds %q: %w", next.Folder, err)
	}
	return s.tidy(disk)
}

// tidy sees that only checkpoints and the store's own files are in the folder.
func (s *story) tidy(disk filesys.Opener) error {
	f, err := disk.Open(s.ck)
	if err != nil {
		return err
	}
	names, err := f.Names()
	if err != nil {
		return err
	}
	for _, n := range names {
		if !strings.HasPrefix(n, "step-") && !slices.Contains(checkpoint.OwnFiles(), n) {
			return fmt.Errorf("%s is left in the folder", n)
		}
	}
	return nil
}
