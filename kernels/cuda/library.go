// Package cuda binds the operations of a step program to kernels of the GPU.
//
// The kernels are CUDA C in src/, compiled for the GPU when the first operation that needs
// them is bound. Bind checks the operation and packs the launch parameters, so that a launch
// allocates nothing. The CPU's library binds operations on host memory; they run in order with
// the device work of their stream.
//
// A file bind_*.go holds the binders of a group of kinds; src/ has a source of the same name
// for each. bind.go has the table of all binders.
package cuda

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/kernels"
	"github.com/spillway-ml/spillway/kernels/cuda/blas"
)

// Options of a Library.
type Options struct {
	API      driver.API
	Device   driver.Device // device of the current context
	Compiler Compiler
	Products blas.Library    // computes matrix products
	Host     kernels.Library // binds operations on host memory
}

// Library is the kernels of one device. The ranks that share its context may
// share it: Bind may be called from several threads, each with the context
// current.
type Library struct {
	o Options

	mu        sync.Mutex
	modules   map[string]driver.Module      // by source name
	functions map[string]driver.Function    // by "source:name"
	shared    map[driver.Function]int       // bytes of dynamic shared memory allowed so far
	reports   []*[reportsPerPage]reportSlot // pages of slots, in page-locked memory
	free      []slotAddress                 // slots of reports that no kernel uses
}

// New returns the kernel library of a device. The context in which the kernels will run
// must be current on the caller's thread.
func New(o Options) (*Library, error) {
	if o.API == nil || o.Compiler == nil || o.Host == nil {
		return nil, errors.New("cuda: library: want a driver, a compiler and the host's kernels")
	}
	return &Library{
		o: o, modules: map[string]driver.Module{}, functions: map[string]driver.Function{}, shared: map[driver.Function]int{},
	}, nil
}

// Close unloads the modules. No bound kernel may still be running.
func (l *Library) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var errs []error
	for _, m := range l.modules {
		errs = append(errs, l.o.API.UnloadModule(m))
	}
	for _, page := range l.reports {
		errs = append(errs, l.o.API.HostFree(unsafe.Pointer(page)))
	}
	l.modules, l.functions, l.reports = map[string]driver.Module{}, map[string]driver.Function{}, nil
	l.free = nil
	return errors.Join(errs...)
}

// function returns a kernel of a source, which it compiles and loads at its
// first use.
func (l *Library) function(source, name string, shared int) (driver.Function, error) {
	return l.functionOf(source, func() (string, error) { return Source(source) }, name, shared)
}

// functionOf is function for a source whose text read returns; source is its unique name.
func (l *Library) functionOf(source string, read func() (string, error), name string, shared int) (driver.Function, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	m, ok := l.modules[source]
	if !ok {
		text, err := read()
		if err != nil {
			return 0, err
		}
		image, err := l.o.Compiler.Compile(source, text, l.o.Device)
		if err != nil {
			return 0, fmt.Errorf("compile %s: %w", source, err)
		}
		if m, err = l.o.API.LoadModule(image); err != nil {
			return 0, fmt.Errorf("load %s: %w", source, err)
		}
		l.modules[source] = m
	}
	f, ok := l.functions[source+":"+name]
	if !ok {
		var err error
		if f, err = l.o.API.Function(m, name); err != nil {
			return 0, fmt.Errorf("kernel %s of %s: %w", name, source, err)
		}
		l.functions[source+":"+name] = f
	}
	if shared > maxSharedPlain && shared > l.shared[f] {
		if err := l.o.API.AllowShared(f, shared); err != nil {
			return 0, fmt.Errorf("kernel %s of %s: %d bytes of shared memory: %w", name, source, shared, err)
		}
		l.shared[f] = shared
	}
	return f, nil
}

// maxSharedPlain is the shared memory in bytes that a block may use without setting the
// function attribute for more.
const maxSharedPlain = 48 << 10

func (l *Library) slot() (slotAddress, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.free) == 0 {
		p, at, err := l.o.API.HostAlloc(int64(unsafe.Sizeof(reportSlot{})) * reportsPerPage)
		if err != nil {
			return slotAddress{}, err
		}
		page := (*[reportsPerPage]reportSlot)(p)
		*page = [reportsPerPage]reportSlot{}
		l.reports = append(l.reports, page)
		for i := range page {
			l.free = append(l.free, slotAddress{&page[i], at + driver.Address(uintptr(i)*unsafe.Sizeof(page[i]))})
		}
	}
	s := l.free[len(l.free)-1]
	l.free = l.free[:len(l.free)-1]
	return s, nil
}
