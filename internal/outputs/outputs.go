// Package outputs sees, before a run touches anything, that no file it is going to
// write is one that it reads, or writes for another purpose.
package outputs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Path is a file or folder, and what it was given by; "" for none, "-" for the standard
// streams.
type Path struct{ Name, Path string }

func (p Path) none() bool { return p.Path == "" || p.Path == "-" }

// Check returns an error that names both if an output is an input, a file in
// an input's folder, or another output: the same file, by whatever name. Devices and
// pipes may be named twice.
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

// refuseWithin refuses an output that would be made in a folder which is read: the
// next run would read it too.
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
		if below, err := filepath.Rel(folder, file); err == nil && filepath.IsLocal(below) {
			return fmt.Errorf("%s %.80q would lie in %.80q, which %s reads; give a file outside it", out.Name, out.Path, in.Path, in.Name)
		}
	}
	return nil
}

// willBeSame tells whether two names are or will be one regular file.
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

// settle is the absolute path of a file that may not be there yet, links of the
// folders above it followed.
func settle(path string) (string, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	rest := ""
	for at := abs; ; at = filepath.Dir(at) {
		real, err := filepath.EvalSymlinks(at)
		if err == nil {
			return filepath.Join(real, rest), nil
		}
		if at == filepath.Dir(at) {
			return abs, nil
		}
		rest = filepath.Join(filepath.Base(at), rest)
	}
}

// holds returns the name under which a file or folder is or holds want; "" if not.
func holds(path string, want fs.FileInfo) (string, error) {
	if path == "" {
		return "", nil
	}
	st, err := os.Stat(path)
	if err != nil {
		return "", nil // whoever opens it says what is wrong
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
			return nil // what can't be read is not read
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

// ModelFiles are the files that a run reads of a model's folder, given by name; none where path is
// no folder.
func ModelFiles(name, path string) (list []Path) {
	if path == "" {
		return nil
	}
	if st, err := os.Stat(path); err != nil || !st.IsDir() {
		return []Path{{name, path}}
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil // whoever opens it says what is wrong
	}
	for _, e := range entries {
		if ext := filepath.Ext(e.Name()); ext == ".json" || ext == ".safetensors" {
			list = append(list, Path{name, filepath.Join(path, e.Name())})
		}
	}
	return list
}
