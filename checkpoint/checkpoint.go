// Package checkpoint writes and finds checkpoints: folders named step-N inside
// a checkpoint folder. Each state is a safetensors file whose tensors carry the
// parameters' logical names and whole shapes, never a rank, a stage or a flat
// offset, so that any number of ranks at any stage can load it.
//
//	DIR/step-00000100/
//	    config.json             the model, in Hugging Face's form
//	    model.safetensors       parameters (master weights), fp32
//	    exp_avg.safetensors …   one file for each optimizer state
//	    manifest.json           step, plan hash, and size and CRC-32C of every file
//
// A checkpoint is written aside, synced and renamed: a folder without the
// temporary prefix is complete. Its manifest is the last file to be written.
package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spillway-ml/spillway/internal/safetensors"
)

// Version of the folder's layout. Readers refuse others.
const Version = 1

const (
	manifestName = "manifest.json"
	prefix       = "step-"
	tempPrefix   = ".writing-"
)

// ErrDamaged is wrapped by errors about a checkpoint whose files are not what
// its manifest says.
var ErrDamaged = errors.New("damaged checkpoint")

// Manifest describes a checkpoint.
type Manifest struct {
	Version  int             `json:"version"`
	Step     int             `json:"step"`      // steps that were done
	PlanHash string          `json:"plan_hash"` // of the program that wrote it, for information
	Ranks    int             `json:"ranks"`     // that wrote it, for information
	Zero     int             `json:"zero"`      // stage that wrote it, for information
	Run      json.RawMessage `json:"run"`       // what a resumed run must agree on
	Files    []File          `json:"files"`
	CRC32C   string          `json:"crc32c"` // of the manifest itself, see sum
}

// sum is the CRC-32C of the manifest's compact JSON without the sum itself: a
// flipped digit of the step would otherwise pass.
func (m Manifest) sum() (string, error) {
	m.CRC32C = ""
	text, err := json.Marshal(m) // Run is compacted too
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%08x", crc32.Checksum(text, crc32.MakeTable(crc32.Castagnoli))), nil
}

// File is one file of a checkpoint.
type File struct {
	Name   string `json:"name"`
	Bytes  int64  `json:"bytes"`
	CRC32C string `json:"crc32c"`
}

// State is a file of tensors to be written: Stream calls sink with the elements
// of a tensor in order.
type State struct {
	Name    string // "model", "exp_avg" …: the file is Name.safetensors
	Tensors []safetensors.Tensor
	Stream  func(tensor string, sink func(start int64, v []float32) error) error
}

// Save writes a checkpoint of m.Step into dir (created if missing) and returns
// its folder. extra writes further files into the folder it is given. A
// checkpoint of the same step is replaced.
func Save(dir string, m Manifest, states []State, extra func(folder string) error) (string, error) {
	fail := func(err error) (string, error) {
		return "", fmt.Errorf("save checkpoint of step %d in %s: %w", m.Step, dir, err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fail(err)
	}
	if err := removeUnfinished(dir); err != nil {
		return fail(err)
	}
	name := fmt.Sprintf("%s%08d", prefix, m.Step)
	temp := filepath.Join(dir, tempPrefix+name)
	if err := os.Mkdir(temp, 0o755); err != nil {
		return fail(err)
	}
	final, err := save(temp, filepath.Join(dir, name), m, states, extra)
	if err != nil {
		return fail(errors.Join(err, os.RemoveAll(temp)))
	}
	return final, nil
}

func save(temp, final string, m Manifest, states []State, extra func(string) error) (string, error) {
	for _, s := range states {
		w, err := safetensors.Create(filepath.Join(temp, s.Name+".safetensors"), s.Tensors, nil)
		if err != nil {
			return "", err
		}
		for _, t := range s.Tensors {
			err := s.Stream(t.Name, func(start int64, v []float32) error { return w.WriteFloat32(t.Name, start, v) })
			if err != nil {
				w.Abort()
				return "", err
			}
		}
		if err := w.Commit(); err != nil {
			return "", err
		}
	}
	if extra != nil {
		if err := extra(temp); err != nil {
			return "", err
		}
	}
	entries, err := os.ReadDir(temp)
	if err != nil {
		return "", err
	}
	m.Version, m.Files = Version, nil
	for _, e := range entries {
		f, err := summarize(filepath.Join(temp, e.Name()))
		if err != nil {
			return "", err
		}
		m.Files = append(m.Files, f)
	}
	if m.CRC32C, err = m.sum(); err != nil {
		return "", err
	}
	text, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return "", err
	}
	if err := writeSynced(filepath.Join(temp, manifestName), append(text, '\n')); err != nil {
		return "", err
	}
	if err := syncDir(temp); err != nil {
		return "", err
	}
	// A checkpoint of the same step stands until the new one is complete: it
	// steps aside under a temporary name, which the next save or load clears.
	if _, err := os.Stat(final); err == nil {
		aside := filepath.Join(filepath.Dir(final), tempPrefix+"old-"+filepath.Base(final))
		if err := os.Rename(final, aside); err != nil {
			return "", err
		}
		defer os.RemoveAll(aside)
	}
	if err := os.Rename(temp, final); err != nil {
		return "", err
	}
	return final, syncDir(filepath.Dir(final))
}

func summarize(path string) (File, error) {
	f, err := os.Open(path)
	if err != nil {
		return File{}, err
	}
	defer f.Close()
	h := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	n, err := io.Copy(h, f)
	if err != nil {
		return File{}, err
	}
	return File{Name: filepath.Base(path), Bytes: n, CRC32C: fmt.Sprintf("%08x", h.Sum32())}, f.Sync()
}

func writeSynced(path string, data []byte) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	return errors.Join(err, f.Sync(), f.Close())
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// removeUnfinished clears what killed saves left. A checkpoint that stepped
// aside for a replacement that never came is put back.
func removeUnfinished(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		name, ok := strings.CutPrefix(e.Name(), tempPrefix)
		if !ok {
			continue
		}
		path := filepath.Join(dir, e.Name())
		if old, ok := strings.CutPrefix(name, "old-"); ok {
			if _, err := os.Stat(filepath.Join(dir, old)); errors.Is(err, os.ErrNotExist) {
				if err := os.Rename(path, filepath.Join(dir, old)); err != nil {
					return err
				}
				continue
			}
		}
		if err := os.RemoveAll(path); err != nil {
			return err
		}
	}
	return nil
}

// List returns the complete checkpoints of dir by ascending step. A missing
// folder has none.
func List(dir string) ([]string, error) {
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err := removeUnfinished(dir); err != nil {
		return nil, fmt.Errorf("list checkpoints of %s: %w", dir, err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list checkpoints: %w", err)
	}
	var steps []int
	names := map[int]string{}
	for _, e := range entries {
		digits, ok := strings.CutPrefix(e.Name(), prefix)
		n, err := strconv.Atoi(digits)
		if ok && err == nil && e.IsDir() {
			steps = append(steps, n)
			names[n] = filepath.Join(dir, e.Name())
		}
	}
	slices.Sort(steps)
	var out []string
	for _, n := range steps {
		out = append(out, names[n])
	}
	return out, nil
}

// Prune removes all but the newest keep checkpoints; keep 0 keeps all.
func Prune(dir string, keep int) error {
	if keep <= 0 {
		return nil
	}
	list, err := List(dir)
	if err != nil {
		return err
	}
	for _, old := range list[:max(len(list)-keep, 0)] {
		// Renamed first: a killed removal leaves no half checkpoint under its name.
		gone := filepath.Join(filepath.Dir(old), tempPrefix+"gone-"+filepath.Base(old))
		if err := os.Rename(old, gone); err != nil {
			return fmt.Errorf("remove old checkpoint: %w", err)
		}
		if err := os.RemoveAll(gone); err != nil {
			return fmt.Errorf("remove old checkpoint: %w", err)
		}
	}
	return nil
}

// ReadManifest reads a checkpoint's manifest without looking at its files.
func ReadManifest(folder string) (Manifest, error) {
	var m Manifest
	path := filepath.Join(folder, manifestName)
	text, err := os.ReadFile(path)
	if err != nil {
		return m, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	if err := json.Unmarshal(text, &m); err != nil {
		return m, fmt.Errorf("%w: %s: %w", ErrDamaged, path, err)
	}
	if m.Version != Version {
		return m, fmt.Errorf("%s: version %d; this program reads version %d", path, m.Version, Version)
	}
	if sum, err := m.sum(); err != nil || sum != m.CRC32C {
		return m, fmt.Errorf("%w: %s does not have the checksum that it says", ErrDamaged, path)
	}
	for _, f := range m.Files {
		if f.Name != filepath.Base(f.Name) || f.Name == "" {
			return m, fmt.Errorf("%w: %s lists a file %q outside of the folder", ErrDamaged, path, f.Name)
		}
	}
	return m, nil
}

// Verify compares every file with the manifest. Errors about differences name
// the file and wrap ErrDamaged.
func Verify(folder string) (Manifest, error) {
	m, err := ReadManifest(folder)
	if err != nil {
		return m, err
	}
	for _, want := range m.Files {
		path := filepath.Join(folder, want.Name)
		got, err := summarize(path)
		switch {
		case errors.Is(err, os.ErrNotExist):
			return m, fmt.Errorf("%w: %s is missing", ErrDamaged, path)
		case err != nil:
			return m, fmt.Errorf("%w: %w", ErrDamaged, err)
		case got.Bytes != want.Bytes:
			return m, fmt.Errorf("%w: %s has %d bytes; the manifest says %d", ErrDamaged, path, got.Bytes, want.Bytes)
		case got.CRC32C != want.CRC32C:
			return m, fmt.Errorf("%w: %s has CRC-32C %s; the manifest says %s", ErrDamaged, path, got.CRC32C, want.CRC32C)
		}
	}
	return m, nil
}

// OpenState opens the tensors of one state of a checkpoint.
func OpenState(folder, name string) (*safetensors.Reader, error) {
	return safetensors.Open(filepath.Join(folder, name+".safetensors"))
}
