//go:build unix

// Package shim runs the GPU's kernels on the CPU, for tests. It compiles their unchanged CUDA C to
// a shared library in which each thread is a fiber.
//
// It detects wrong results, barriers that not all threads reach, and shuffles with lanes that do
// not exist. It does not detect races between blocks, and supports neither inline PTX nor tensor
// cores. A source puts those into functions that have a scalar twin if SHIM is defined.
package shim

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/cpu"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/internal/owned"
	"github.com/spillway-ml/spillway/internal/userdir"
)

//go:embed shim.h
var header string

// ErrNoCompiler is returned if there is no C++ compiler.
var ErrNoCompiler = errors.New("shim: no C++ compiler: looked for $CXX, g++ and clang++")

// Prefix begins a module image that is the path of a shared library.
const Prefix = "shim:"

// Compiler compiles kernels for the CPU. It is a cuda.Compiler.
type Compiler struct {
	cxx     string
	version string // compiler's version, part of a library's name
	dir     string

	mu      sync.Mutex
	warn    func(string)
	foreign sync.Once // the one warning about a folder that is not the user's own
}

// New returns a compiler that keeps compiled libraries in the user's cache folder. It returns
// ErrNoCompiler if there is no compiler.
func New() (*Compiler, error) {
	dir, err := userdir.Cache()
	if err != nil {
		dir = os.TempDir()
	}
	return At(filepath.Join(dir, "spillway", "shim"))
}

// At is New with a given folder for compiled libraries.
func At(dir string) (*Compiler, error) {
	for _, name := range []string{os.Getenv("CXX"), "g++", "clang++"} {
		if name == "" {
			continue
		}
		path, err := exec.LookPath(name)
		if err != nil {
			continue
		}
		version, err := exec.Command(path, "--version").Output()
		if err != nil {
			return nil, fmt.Errorf("shim: %s --version: %w", path, err)
		}
		return &Compiler{cxx: path, version: string(version), dir: dir, warn: func(s string) { fmt.Fprintln(os.Stderr, s) }}, nil
	}
	return nil, ErrNoCompiler
}

// flags returns options that keep the sources' arithmetic: no contraction, no fast math. A loaded
// library is never unloaded, because threads have stacks of fibers in it.
func flags() []string {
	f := []string{
		"-x", "c++", "-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing",
		"-fvisibility=hidden", "-Wl,-z,nodelete", "-Wno-unused-function", "-Wno-unknown-pragmas", "-Wno-narrowing",
	}
	if cpu.X86.HasFMA {
		f = append(f, "-mfma")
	}
	return f
}

// Compile returns the image of a source: Prefix and the path of its library. A source is compiled
// only once, unless other users may write the folder or the library. It is then compiled into a
// temporary folder, which Open removes.
func (c *Compiler) Compile(name, source string, _ driver.Device) ([]byte, error) {
	text := header + source
	h := sha256.New()
	for _, s := range append(flags(), c.cxx, c.version, text) {
		fmt.Fprintf(h, "%d:%s", len(s), s)
	}
	stem := strings.TrimSuffix(filepath.Base(name), ".cu")
	file := stem + "-" + hex.EncodeToString(h.Sum(nil))[:24] + ".so"
	c.mu.Lock()
	defer c.mu.Unlock()
	path, there, err := c.place(file)
	if err != nil {
		return nil, fmt.Errorf("shim: %s: %w", name, err)
	}
	if there {
		return []byte(Prefix + path), nil
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), stem+"-*.tmp")
	if err != nil {
		return nil, fmt.Errorf("shim: %s: %w", name, err)
	}
	_ = tmp.Close()
	defer func() { _ = os.Remove(tmp.Name()) }()
	cmd := exec.Command(c.cxx, append(flags(), "-o", tmp.Name(), "-")...)
	cmd.Stdin = strings.NewReader(text)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("shim: %s %s: %w\n%s", c.cxx, name, err, head(out.String(), 4000))
	}
	err = os.Chmod(tmp.Name(), 0o700) // the linker's mode follows the umask
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		return nil, fmt.Errorf("shim: %s: %w", name, err)
	}
	return []byte(Prefix + path), nil
}

// place returns the path of a library, and whether it exists. The path is in the compiler's folder,
// or in a new one if the folder, or the library in it, is not the user's own.
func (c *Compiler) place(file string) (path string, there bool, err error) {
	path = filepath.Join(c.dir, file)
	err = owned.Make(c.dir)
	if err == nil {
		var st os.FileInfo
		if st, err = os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			return path, false, nil
		}
		if err == nil {
			err = owned.Check(path, st)
		}
	}
	var e *owned.Error
	if !errors.As(err, &e) {
		return path, err == nil, err
	}
	c.foreign.Do(func() { c.warn(fmt.Sprintf("shim: compiled again, not loaded from the cache: %v", e)) })
	dir, err := os.MkdirTemp("", "spillway-shim-")
	if err != nil {
		return "", false, err
	}
	path = filepath.Join(dir, file)
	openMu.Lock()
	defer openMu.Unlock()
	once[path] = true
	return path, false, nil
}

func head(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return s[:n] + " …"
}
