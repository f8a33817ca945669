// Package dynlib finds and opens NVIDIA's libraries at run time, as installed by a CUDA
// toolkit, a distribution or a Python environment.
package dynlib

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spillway-ml/spillway/internal/dl"
	"github.com/spillway-ml/spillway/internal/userdir"
)

// Env names the environment variable that lists folders to search first, separated as in
// PATH.
const Env = "SPILLWAY_CUDA_LIBS"

// folders are common install folders outside the loader's search path, as patterns of
// path.Match. Of several matches the newest version, by name, comes first.
var folders = []string{
	"/usr/local/cuda/lib64",
	"/usr/local/cuda-*/lib64",
	"/opt/cuda/lib64",
	"/usr/local/nvidia/lib64", // containers
	"/usr/lib/wsl/lib",
	"/usr/lib/x86_64-linux-gnu",
	"/usr/lib/x86_64-linux-gnu/nvidia/current",
	"/usr/lib/aarch64-linux-gnu",
	"/usr/lib64",
}

// sites are the package folders of a Python environment, relative to its root.
var sites = []string{
	"lib/python3*/site-packages/nvidia/*/lib",
	"lib/python3*/dist-packages/nvidia/*/lib",
	"lib64/python3*/site-packages/nvidia/*/lib",
	"lib/python3/dist-packages/nvidia/*/lib",
}

// pythons returns the roots of Python environments: the active one, those of the
// user and the system, and that of the python3 in absolute folders of PATH.
func pythons() []string {
	var roots []string
	for _, v := range []string{"VIRTUAL_ENV", "CONDA_PREFIX"} {
		if root := os.Getenv(v); root != "" {
			roots = append(roots, root)
		}
	}
	for _, dir := range filepath.SplitList(os.Getenv("PATH")) {
		if !filepath.IsAbs(dir) { // a relative path would load a library from the working folder
			continue
		}
		if _, err := os.Stat(filepath.Join(dir, "python3")); err == nil && filepath.Base(dir) == "bin" {
			roots = append(roots, filepath.Dir(dir))
		}
	}
	if home, err := userdir.Home(); err == nil {
		roots = append(roots, filepath.Join(home, ".local"))
	}
	return append(roots, "/usr/local", "/usr", "/opt/conda")
}

// Candidates returns the paths that Open tries for names, in order: the folders of Env, then
// the bare names, which the loader searches, then common install folders, then Python
// environments.
func Candidates(names ...string) []string {
	var list []string
	in := func(dir string) {
		for _, name := range names {
			path := filepath.Join(dir, name)
			if _, err := os.Stat(path); err == nil && !slices.Contains(list, path) {
				list = append(list, path)
			}
		}
	}
	for _, dir := range filepath.SplitList(os.Getenv(Env)) {
		in(dir)
	}
	list = append(list, names...)
	glob := func(pattern string) {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return // an invalid pattern: only possible if a Python root has brackets in its name
		}
		slices.Reverse(found)
		for _, dir := range found {
			in(dir)
		}
	}
	for _, pattern := range folders {
		glob(pattern)
	}
	for _, root := range pythons() {
		for _, site := range sites {
			glob(filepath.Join(root, site))
		}
	}
	return list
}

// UpTo filters library file names for a driver with the given CUDA version, such as 12040: it
// drops those of a newer major version. Version 0 means unknown and keeps all names.
func UpTo(version int, names ...string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool {
		_, number, _ := strings.Cut(name, ".so.")
		major, err := strconv.Atoi(strings.SplitN(number, ".", 2)[0])
		return err == nil && version > 0 && major > version/1000
	})
}

// NotFound is the error for a library that was not found or could not be opened.
type NotFound struct {
	What   string   // "cuBLASLt"
	Names  []string // its file names
	Tried  []string // paths that exist but could not be opened
	Reason string   // why the last of Tried could not be opened
}

func (e *NotFound) Error() string {
	if err := dl.Err(); err != nil {
		return fmt.Sprintf("%s: %v", e.What, err)
	}
	text := fmt.Sprintf("%s was not found: looked for %s in $%s, the loader's path, /usr/local/cuda and Python's nvidia/*/lib", e.What, strings.Join(e.Names, ", "), Env)
	if len(e.Tried) > 0 {
		text += fmt.Sprintf("; %s did not open: %s", strings.Join(e.Tried, ", "), e.Reason)
	}
	return text
}

// Library is an open shared library. It is never unloaded: NVIDIA's libraries register
// destructors that run at thread and process exit, and their code must still be loaded then.
type Library struct {
	Path   string // as it was opened
	handle uintptr
}

// Open opens the first library that it can. what is the library's name for messages; names are
// its file names, the preferred one first.
func Open(what string, names ...string) (*Library, error) {
	missing := &NotFound{What: what, Names: names}
	for _, path := range Candidates(names...) {
		h, err := dl.Open(path, dl.Lazy|dl.Local|dl.NoDelete)
		if err == nil {
			return &Library{Path: path, handle: h}, nil
		}
		if filepath.IsAbs(path) {
			missing.Tried = append(missing.Tried, path)
			missing.Reason = err.Error()
		}
	}
	return nil, missing
}

// Symbols fills in the addresses of functions by name. The error names the first
// one that the library does not have.
func (l *Library) Symbols(functions map[string]*uintptr) error {
	for name, at := range functions {
		p, err := dl.Symbol(l.handle, name)
		if err != nil {
			return fmt.Errorf("%s has no %s: %w", l.Path, name, err)
		}
		*at = p
	}
	return nil
}

// Preload opens the library at path with global visibility and leaves it open, so that
// libraries opened later find its symbols.
func Preload(path string) error {
	_, err := dl.Open(path, dl.Now|dl.Global)
	return err
}
