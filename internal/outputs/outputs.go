// Package outputs checks, before a run touches any file, that no output is one of its inputs, a
// file of a checkpoint or another output.
package outputs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spillway-ml/spillway/checkpoint"
)

// Path is a file or folder with the name of the option that gave it; Path is "" for none and
// "-" for the standard streams.
type Path struct{ Name, Path string }

func (p Path) none() bool { return p.Path == "" || p.Path == "-" }

// Check returns an error if an output is the same file as an input, a file in an input's folder, or
// another output. It compares files, not names; the error names both options. Devices and pipes may
// be given twice.
func Check(outputs, inputs []Path) error {
	for i, out := range outputs {
		if out.none() {
			continue
		}
		for _, other := range outputs[:i] {
			if same, err := willBeSame(out.Path, other.Path); err != nil {
				return fmt.Errorf("%s: %w", out.Name, err)
			} else if same {
				return fmt.Errorf("%s %.80q is the file of %s too; give each its own", out.Name, out.Path, other.Name)
			}
		}
		st, err := os.Stat(out.Path)
		if errors.Is(err, fs.ErrNotExist) {
			if err := refuseWithin(out, inputs); err != nil {
				return err
			}
		}
		if err != nil || !st.Mode().IsRegular() {
			continue
		}
		for _, in := range inputs {
			found, err := holds(in.Path, st)
			if err != nil {
				return fmt.Errorf("%s %.80q: looking for %s in it: %w", in.Name, in.Path, out.Name, err)
			}
			if found != "" {
				return fmt.Errorf("%s %.80q would overwrite %.80q, which %s reads; give another file", out.Name, out.Path, found, in.Name)
			}
		}
	}
	return nil
}

// refuseWithin refuses an output in a folder that is an input: the next run would read that
// output.
func refuseWithin(out Path, inputs []Path) error {
	file, err := settle(out.Path)
	if err != nil {
		return fmt.Errorf("%s: %w", out.Name, err)
	}
	for _, in := range inputs {
		st, err := os.Stat(in.Path)
		if in.Path == "" || err != nil || !st.IsDir() {
			continue
		}
		folder, err := settle(in.Path)
		if err != nil {
			return fmt.Errorf("%s: %w", in.Name, err)
		}
		if lies(file, folder) {
			return fmt.Errorf("%s %.80q would lie in %.80q, which %s reads; give a file outside it", out.Name, out.Path, in.Path, in.Name)
		}
	}
	return nil
}

// willBeSame says whether two names are or will be one regular file.
func willBeSame(a, b string) (bool, error) {
	if (Path{Path: b}).none() {
		return false, nil
	}
	x, errX := os.Stat(a)
	y, errY := os.Stat(b)
	if errX == nil && errY == nil {
		return x.Mode().IsRegular() && os.SameFile(x, y), nil
	}
	if errX == nil || errY == nil {
		return false, nil
	}
	a, err := settle(a)
	if err != nil {
		return false, err
	}
	b, err = settle(b)
	return a == b, err
}

// mostLinks bounds the links that settle follows, as Linux does.
const mostLinks = 40

// settle returns the absolute path of a file that may not exist yet. It resolves links, even if
// their target does not exist yet.
func settle(path string) (string, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	at, rest := abs, ""
	for links := 0; ; {
		real, err := filepath.EvalSymlinks(at)
		if err == nil {
			return filepath.Join(real, rest), nil
		}
		folder := filepath.Dir(at)
		if to, err := os.Readlink(at); err == nil && links < mostLinks {
			links++
			if !filepath.IsAbs(to) {
				if folder, err = filepath.EvalSymlinks(folder); err != nil { // ".." in to is above the real folder
					return abs, nil
				}
				to = filepath.Join(folder, to)
			}
			at = to
			continue
		}
		if at == folder {
			return abs, nil
		}
		at, rest = folder, filepath.Join(filepath.Base(at), rest)
	}
}

// holds returns the name under which a file or folder is want or contains it; "" if not.
func holds(path string, want fs.FileInfo) (string, error) {
	if path == "" {
		return "", nil
	}
	st, err := os.Stat(path)
	if err != nil {
		return "", nil // opening the file later reports the error
	}
	if !st.IsDir() {
		if os.SameFile(st, want) {
			return path, nil
		}
		return "", nil
	}
	found := ""
	err = filepath.WalkDir(path, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil // a file that can't be read is no input
		}
		if st, err := os.Stat(name); err == nil && os.SameFile(st, want) {
			found = name
			return filepath.SkipAll
		}
		return nil
	})
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	return found, err
}

// CheckStored returns an error if an output is inside a checkpoint of a folder, or has a name that
// checkpoints or the store's own files use there, even if it does not exist yet. A folder is a
// checkpoint folder, or one checkpoint, for which its parent folder is checked too. The error names
// both options.
func CheckStored(outputs, folders []Path) error {
	for _, dir := range folders {
		if dir.none() {
			continue
		}
		folder, err := settle(dir.Path)
		if err != nil {
			return fmt.Errorf("%s: %w", dir.Name, err)
		}
		_, single := checkpoint.Stat(folder)
		for _, out := range outputs {
			if out.none() {
				continue
			}
			file, err := settle(out.Path)
			if err != nil {
				return fmt.Errorf("%s: %w", out.Name, err)
			}
			if single && lies(file, folder) || stored(file, folder) ||
				checkpoint.Reserved(filepath.Base(folder)) && stored(file, filepath.Dir(folder)) {
				return fmt.Errorf("%s %.80q would lie among the checkpoints of %s %.80q; give a path elsewhere",
					out.Name, out.Path, dir.Name, dir.Path)
			}
		}
		kept := []Path{dir}
		if !single {
			kept = storedIn(dir)
		}
		if err := Check(outputs, kept); err != nil { // hard links
			return err
		}
	}
	return nil
}

// lies says whether a settled path is a settled folder, or below it.
func lies(path, folder string) bool {
	below, err := filepath.Rel(folder, path)
	return err == nil && filepath.IsLocal(below)
}

// stored says whether a settled path is, or is inside, a file or folder that a Store keeps, or may
// make, in a settled folder.
func stored(path, folder string) bool {
	below, err := filepath.Rel(folder, path)
	first, _, _ := strings.Cut(below, string(filepath.Separator))
	return err == nil && checkpoint.Reserved(first)
}

// storedIn lists the files and folders that a Store keeps in the folder of an option.
func storedIn(dir Path) (list []Path) {
	entries, err := os.ReadDir(dir.Path)
	if err != nil {
		return nil // opening the folder later reports the error
	}
	for _, e := range entries {
		if checkpoint.Reserved(e.Name()) {
			list = append(list, Path{dir.Name, filepath.Join(dir.Path, e.Name())})
		}
	}
	return list
}

// Folders returns the paths that are existing folders. Other paths are names of models, or files.
func Folders(paths ...Path) (list []Path) {
	for _, p := range paths {
		if st, err := os.Stat(p.Path); err == nil && st.IsDir() {
			list = append(list, p)
		}
	}
	return list
}

// ModelFiles lists the files in a model's folder that a run reads; name is the option that gave
// the folder. It is empty if path is not a folder.
func ModelFiles(name, path string) (list []Path) {
	if path == "" {
		return nil
	}
	if st, err := os.Stat(path); err != nil || !st.IsDir() {
		return []Path{{name, path}}
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil // opening the folder later reports the error
	}
	for _, e := range entries {
		if ext := filepath.Ext(e.Name()); ext == ".json" || ext == ".safetensors" {
			list = append(list, Path{name, filepath.Join(path, e.Name())})
		}
	}
	return list
}
