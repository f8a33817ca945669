// Package nvrtc compiles CUDA C with NVRTC, NVIDIA's runtime compiler, which it opens at
// run time. It caches the compiled kernels on disk.
package nvrtc

import (
	"bytes"
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"unsafe"

	"github.com/spillway-ml/spillway/internal/dl"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/device/cuda/dynlib"
)

// Names are NVRTC's file names, the newest first. CUDA 11.8 still uses the name 11.2,
// the version of its interface.
var Names = []string{"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2", "libnvrtc.so"}

// calls are the addresses of NVRTC's functions.
type calls struct {
	version, errorString                     uintptr
	numArchs, archs                          uintptr
	create, compile, destroy                 uintptr
	logSize, log                             uintptr
	cubinSize, cubin, assemblySize, assembly uintptr
}

// Options of a Compiler.
type Options struct {
	// Driver is the driver's CUDA version, such as 12040. NVRTC of a newer major version
	// is an error, because the driver would refuse its code. 0 accepts any.
	Driver int
	// Cache is the folder for compiled kernels. Empty: a folder in the user's cache
	// directory. "-": no cache.
	Cache string
	// Warn is called with each warning about the cache, one line a call. nil drops them.
	Warn func(string)
}

// Compiler is NVRTC. It is a cuda.Compiler, and may be used from several threads.
type Compiler struct {
	lib          *dynlib.Library
	c            calls
	major, minor int   // NVRTC's version
	archs        []int // compute capabilities that it compiles for, as 10·major+minor, sorted
	cache        *cache

	mu sync.Mutex
}

// Open finds and loads NVRTC; package dynlib describes the search. If NVRTC is not
// installed, the error is a *dynlib.NotFound.
func Open(o Options) (*Compiler, error) {
	lib, err := dynlib.Open("NVRTC (CUDA's runtime compiler)", dynlib.UpTo(o.Driver, Names...)...)
	if err != nil {
		return nil, err
	}
	n := &Compiler{lib: lib, cache: newCache(o)}
	n.builtins()
	if err := lib.Symbols(map[string]*uintptr{
		"nvrtcVersion": &n.c.version, "nvrtcGetErrorString": &n.c.errorString,
		"nvrtcGetNumSupportedArchs": &n.c.numArchs, "nvrtcGetSupportedArchs": &n.c.archs,
		"nvrtcCreateProgram": &n.c.create, "nvrtcCompileProgram": &n.c.compile, "nvrtcDestroyProgram": &n.c.destroy,
		"nvrtcGetProgramLogSize": &n.c.logSize, "nvrtcGetProgramLog": &n.c.log,
		"nvrtcGetCUBINSize": &n.c.cubinSize, "nvrtcGetCUBIN": &n.c.cubin,
		"nvrtcGetPTXSize": &n.c.assemblySize, "nvrtcGetPTX": &n.c.assembly,
	}); err != nil {
		return nil, fmt.Errorf("nvrtc: %w (NVRTC 11.2 or newer is needed)", err)
	}
	if err := n.describe(); err != nil {
		return nil, err
	}
	if o.Driver > 0 && n.major > o.Driver/1000 {
		return nil, fmt.Errorf("nvrtc: %s is of CUDA %s, the driver of %d.%d: put a library of the driver's major version into $%s", lib.Path, n.Version(), o.Driver/1000, o.Driver%1000/10, dynlib.Env)
	}
	return n, nil
}

// builtins preloads libnvrtc-builtins from NVRTC's own folder. NVRTC opens it by its bare
// name, which fails if the loader does not search that folder.
func (n *Compiler) builtins() {
	if !filepath.IsAbs(n.lib.Path) {
		return
	}
	found, _ := filepath.Glob(filepath.Join(filepath.Dir(n.lib.Path), "libnvrtc-builtins.so*"))
	for _, path := range found {
		_ = dynlib.Preload(path) // if this fails, NVRTC's own error names the library
	}
}

func (n *Compiler) describe() error {
	var major, minor, count int32
	if err := n.call("nvrtcVersion", n.c.version, uintptr(unsafe.Pointer(&major)), uintptr(unsafe.Pointer(&minor))); err != nil {
		return err
	}
	n.major, n.minor = int(major), int(minor)
	if err := n.call("nvrtcGetNumSupportedArchs", n.c.numArchs, uintptr(unsafe.Pointer(&count))); err != nil {
		return err
	}
	list := make([]int32, max(count, 1))
	if err := n.call("nvrtcGetSupportedArchs", n.c.archs, uintptr(unsafe.Pointer(&list[0]))); err != nil {
		return err
	}
	for _, a := range list[:count] {
		n.archs = append(n.archs, int(a))
	}
	slices.Sort(n.archs)
	if len(n.archs) == 0 {
		return fmt.Errorf("nvrtc: %s compiles for no architecture", n.lib.Path)
	}
	return nil
}

// Version is NVRTC's, "12.8".
func (n *Compiler) Version() string { return fmt.Sprintf("%d.%d", n.major, n.minor) }

// Path is the file name of the opened library.
func (n *Compiler) Path() string { return n.lib.Path }

// call calls an NVRTC function. The directive below moves the objects that its arguments
// point to onto the heap, so that they do not move during the call.
//
//go:uintptrescapes
func (n *Compiler) call(name string, f uintptr, args ...uintptr) error {
	code := dl.Call(f, args...)
	if int32(code) == 0 {
		return nil
	}
	s := dl.Call(n.c.errorString, code)
	return &driver.Error{Call: name, Code: int(int32(code)), Name: text(s)}
}

// text copies a C string.
func text(p uintptr) string {
	if p == 0 {
		return ""
	}
	var b []byte
	for at := *(*unsafe.Pointer)(unsafe.Pointer(&p)); *(*byte)(at) != 0; at = unsafe.Add(at, 1) {
		b = append(b, *(*byte)(at))
	}
	return string(b)
}

// arch chooses the architecture to compile for: the GPU's own machine code, else that of
// an older GPU of the same generation. If NVRTC knows neither, it is PTX ("compute_90"), which
// the driver translates.
func (n *Compiler) arch(major, minor int) (string, error) {
	card, best := 10*major+minor, 0
	for _, a := range n.archs {
		if a <= card {
			best = a
		}
	}
	switch {
	case best == 0:
		return "", fmt.Errorf("NVRTC %s compiles for compute capability %.1f and newer, the card has %d.%d", n.Version(), float64(n.archs[0])/10, major, minor)
	case best/10 == major:
		return fmt.Sprintf("sm_%d", best), nil
	}
	return fmt.Sprintf("compute_%d", best), nil
}

// options returns compiler options that keep arithmetic exactly as written: no contraction
// to fused multiply-adds, IEEE division and square roots, no flushing of subnormals.
func options(arch string) []string {
	return []string{"--gpu-architecture=" + arch, "--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true"}
}

// Compile returns a cubin for a device, or PTX if NVRTC does not know the GPU.
func (n *Compiler) Compile(name, source string, dev driver.Device) ([]byte, error) {
	arch, err := n.arch(dev.Major, dev.Minor)
	if err != nil {
		return nil, fmt.Errorf("nvrtc: %s: %w", name, err)
	}
	return n.CompileFor(name, source, arch)
}

// CompileFor returns machine code ("sm_90") or PTX ("compute_80") for an architecture. It
// reads the cache, or compiles and adds the result to the cache. If the source does not
// compile, the error contains NVRTC's log.
func (n *Compiler) CompileFor(name, source, arch string) ([]byte, error) {
	opts := options(arch)
	key := append([]string{n.Version(), name, source}, opts...)
	if image := n.cache.get(name, arch, key); image != nil {
		return image, nil
	}
	image, _, err := n.compile(name, source, opts)
	if err != nil {
		return nil, err
	}
	n.cache.put(name, arch, key, image)
	return image, nil
}

// Report compiles a source to machine code of an architecture ("sm_90"). It returns the
// code and the assembler's log of every kernel's resource usage. It bypasses the cache.
func (n *Compiler) Report(name, source, arch string) (image []byte, log string, err error) {
	return n.compile(name, source, append(options(arch), "--ptxas-options=-v"))
}

func (n *Compiler) compile(name, source string, opts []string) (image []byte, log string, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	src, file := append([]byte(source), 0), append([]byte(name), 0)
	var pin runtime.Pinner
	defer pin.Unpin()
	var list []*byte
	for _, o := range opts {
		c := append([]byte(o), 0)
		pin.Pin(&c[0])
		list = append(list, &c[0])
	}
	var prog uintptr
	if err := n.call("nvrtcCreateProgram", n.c.create, uintptr(unsafe.Pointer(&prog)), uintptr(unsafe.Pointer(&src[0])), uintptr(unsafe.Pointer(&file[0])), 0, 0, 0); err != nil {
		return nil, "", fmt.Errorf("nvrtc: %s: %w", name, err)
	}
	defer func() { _ = n.call("nvrtcDestroyProgram", n.c.destroy, uintptr(unsafe.Pointer(&prog))) }()
	failed := n.call("nvrtcCompileProgram", n.c.compile, prog, uintptr(len(list)), uintptr(unsafe.Pointer(&list[0])))
	runtime.KeepAlive(src)
	runtime.KeepAlive(file)
	said, err := n.fetch("nvrtcGetProgramLog", prog, n.c.logSize, n.c.log)
	if err != nil {
		return nil, "", fmt.Errorf("nvrtc: %s: %w", name, err)
	}
	log = strings.TrimSpace(string(bytes.TrimRight(said, "\x00")))
	if failed != nil {
		return nil, log, fmt.Errorf("nvrtc: %s (NVRTC %s, %s): %w\n%s", name, n.Version(), opts[0], failed, shorten(log, 6000))
	}
	if strings.Contains(opts[0], "=sm_") {
		image, err = n.fetch("nvrtcGetCUBIN", prog, n.c.cubinSize, n.c.cubin)
	} else {
		image, err = n.fetch("nvrtcGetPTX", prog, n.c.assemblySize, n.c.assembly)
	}
	if err != nil {
		return nil, log, fmt.Errorf("nvrtc: %s: %w", name, err)
	}
	return image, log, nil
}

// fetch returns a result of NVRTC: function size gives its length and function get copies
// its bytes.
func (n *Compiler) fetch(name string, prog, size, get uintptr) ([]byte, error) {
	var bytes uintptr
	if err := n.call(name+"Size", size, prog, uintptr(unsafe.Pointer(&bytes))); err != nil {
		return nil, err
	}
	if bytes == 0 {
		return nil, nil
	}
	b := make([]byte, bytes)
	err := n.call(name, get, prog, uintptr(unsafe.Pointer(&b[0])))
	return b, err
}

func shorten(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return s[:n] + " …"
}
