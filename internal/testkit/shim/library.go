//go:build unix

package shim

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/spillway-ml/spillway/device/cuda/driver"
)

// Library is a compiled source.
type Library struct {
	path   string
	handle uintptr

	mu      sync.Mutex
	kernels map[string]Kernel
}

// Kernel is the host function of a kernel. It returns 0, or a code for an invalid launch.
type Kernel func(grid, block *[3]uint32, shared uint32, params unsafe.Pointer) int32

var (
	opened = map[string]*Library{}
	once   = map[string]bool{} // libraries that are alone in a temporary folder
	openMu sync.Mutex
)

// Open loads an image made by Compile. A library stays loaded, because a process has only a few.
func Open(image []byte) (*Library, error) {
	path, ok := strings.CutPrefix(string(image), Prefix)
	if !ok {
		return nil, fmt.Errorf("shim: the image does not start with %q", Prefix)
	}
	openMu.Lock()
	defer openMu.Unlock()
	if l := opened[path]; l != nil {
		return l, nil
	}
	h, err := purego.Dlopen(path, purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return nil, fmt.Errorf("shim: open %s: %w", path, err)
	}
	if once[path] { // a loaded library needs no file
		_ = os.RemoveAll(filepath.Dir(path))
	}
	l := &Library{path: path, handle: h, kernels: map[string]Kernel{}}
	opened[path] = l
	return l, nil
}

// Kernel returns a kernel of the library by its name in CUDA C.
func (l *Library) Kernel(name string) (Kernel, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if k := l.kernels[name]; k != nil {
		return k, nil
	}
	sym, err := purego.Dlsym(l.handle, "shim_"+name)
	if err != nil {
		return nil, fmt.Errorf("shim: %s has no kernel %s", l.path, name)
	}
	var k Kernel
	purego.RegisterFunc(&k, sym)
	l.kernels[name] = k
	return k, nil
}

// ParameterBytes returns the number of bytes of a kernel's parameters.
func (l *Library) ParameterBytes(name string) (int, error) {
	sym, err := purego.Dlsym(l.handle, "shim_size_"+name)
	if err != nil {
		return 0, fmt.Errorf("shim: %s has no kernel %s", l.path, name)
	}
	n, _, _ := purego.SyscallN(sym)
	return int(n), nil
}

// Launch runs a kernel over a grid, with parameters as driver.Args packs them.
func (l *Library) Launch(name string, grid, block driver.Dim, shared int, params unsafe.Pointer) error {
	k, err := l.Kernel(name)
	if err != nil {
		return err
	}
	g, b := [3]uint32{grid.X, grid.Y, grid.Z}, [3]uint32{block.X, block.Y, block.Z}
	if code := k(&g, &b, uint32(shared), params); code != 0 {
		return fmt.Errorf("shim: kernel %s failed with status %d: %s", name, code, l.message())
	}
	return nil
}

func (l *Library) message() string {
	var f func() string
	purego.RegisterLibFunc(&f, l.handle, "shim_message")
	return f()
}

// Reverse makes blocks, and the threads of a block, run from the last to the first, or again from
// the first. If results depend on this, the kernel is wrong on a GPU.
func (l *Library) Reverse(on bool) {
	var f func(int32)
	purego.RegisterLibFunc(&f, l.handle, "shim_order")
	order := int32(0)
	if on {
		order = 1
	}
	f(order)
}
