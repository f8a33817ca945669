// Package cuda binds the operations of a step program to kernels of the GPU.
//
// The kernels are CUDA C in src/, compiled for the GPU when the first operation that needs
// them is bound. Bind checks the operation and packs the launch parameters, so that a launch
// allocates nothing. The CPU's library binds operations on host memory; they run in order with
// the device work of their stream.
//
// A file bind_*.go holds the binders of a group of kinds; src/ has a source of the same name
// for each.
package cuda

import (
	"errors"
	"fmt"
	"sync"
	"unsafe"

	"github.com/spillway-ml/spillway/device"
	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/graph"
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

// binder prepares an operation of one kind: it adds the launches that execute it. If the
// binding has an error, the launches are invalid.
type binder func(b *binding)

// binders has an entry for every kind but collectives and copies.
var binders = map[graph.Kind]binder{
	graph.Embed:      bindEmbed,
	graph.EmbedGrad:  bindEmbedGrad,
	graph.AddPos:     bindAddPos,
	graph.AddPosGrad: bindAddPosGrad,
	graph.SelectRow:  bindSelectRow,
	graph.Rope:       bindRope,

	graph.Linear:        bindLinear,
	graph.LinearAct:     bindLinearAct,
	graph.LinearGradX:   bindLinearGrad,
	graph.LinearGradAct: bindLinearGradAct,
	graph.LinearGradW:   bindLinearGrad,
	graph.LinearGradWB:  bindLinearGradWB,
	graph.BiasGrad:      bindBiasGrad,

	graph.LayerNorm:     func(b *binding) { b.norm("layernorm_", b.operands()) },
	graph.LayerNormGrad: func(b *binding) { b.normGrad(b.in(3), b.in(4), b.out(2), b.accum(2)) },
	graph.RMSNorm:       func(b *binding) { b.norm("rmsnorm_", b.operands()) },
	graph.RMSNormGrad:   func(b *binding) { b.normGrad(0, b.in(3), 0, 0) },

	graph.Softmax:          bindSoftmax,
	graph.SoftmaxGrad:      bindSoftmaxGrad,
	graph.CrossEntropy:     bindCrossEntropy,
	graph.CrossEntropyGrad: bindCrossEntropyGrad,
	graph.HeadLoss:         bindHeadLoss,
	graph.HeadLossGrad:     bindHeadLoss,

	graph.Add:            func(b *binding) { b.elementwise("add", true) },
	graph.Sub:            func(b *binding) { b.elementwise("sub", true) },
	graph.Mul:            func(b *binding) { b.elementwise("mul", true) },
	graph.Scale:          func(b *binding) { b.elementwise("scale", true, float32(attr[graph.ScaleAttr](b).Factor)) },
	graph.SumGrad:        func(b *binding) { b.elementwise("sum_grad", true) },
	graph.Activation:     func(b *binding) { b.elementwise("act_"+string(attr[graph.ActAttr](b).Act), false) },
	graph.ActivationGrad: func(b *binding) { b.elementwise("act_grad_"+string(attr[graph.ActAttr](b).Act), true) },
	graph.SwiGLU:         func(b *binding) { b.elementwise("swiglu", false) },
	graph.SwiGLUGrad:     func(b *binding) { b.elementwise("swiglu_grad", false) },
	graph.Sum:            bindSum,
	graph.Fill:           bindFill,
	graph.Cast:           bindCast,
	graph.SumParts:       bindSumParts,
	graph.Dropout:        bindDropout,

	graph.Attention:     bindAttention,
	graph.AttentionGrad: bindAttentionGrad,

	graph.Im2Col:      func(b *binding) { b.conv("im2col", b.inBuf(0), false) },
	graph.Col2Im:      func(b *binding) { b.conv("col2im", b.outBuf(0), true) },
	graph.MaxPool:     func(b *binding) { b.conv("maxpool", b.inBuf(0), false) },
	graph.MaxPoolGrad: func(b *binding) { b.conv("maxpool_grad", b.inBuf(1), true) },

	graph.SqSum:           bindSqSum,
	graph.ClipCoef:        bindClipCoef,
	graph.OverflowCheck:   bindOverflowCheck,
	graph.LossScaleUpdate: bindLossScaleUpdate,
	"adamw":               bindAdamW,
	"sgd":                 func(b *binding) { bindMomentum(b, ruleSGD) },
	"lamb_dir":            bindLAMBDirection,
	"lamb_apply":          bindLAMBApply,
	graph.ParamNorms:      bindParamNorms,
	"lars_apply":          func(b *binding) { bindMomentum(b, ruleLARS) },
	"novograd":            bindNovoGrad,
}

// Bind prepares an operation. It returns an error that names the operation and the operand
// if the kind has no kernel (the executor runs collectives and copies itself), if graph.Check
// rejects the operation, or if an operand or the workspace has invalid memory. A source that
// does not compile is an error too.
func (l *Library) Bind(kb kernels.Binding) (device.Kernel, error) {
	if kb.Program == nil || kb.Op == nil {
		return nil, errors.New("cuda: bind: want a program and an operation")
	}
	bind, ok := binders[kb.Op.Kind]
	if kb.Op.BringsKernels() {
		bind, ok = bindOwn, true
	}
	if !ok {
		return nil, fmt.Errorf("cuda: bind %s: no kernel for kind %q", kb.Op.Name, kb.Op.Kind)
	}
	if err := graph.Check(kb.Program, kb.Op); err != nil {
		return nil, fmt.Errorf("cuda: bind: %w", err)
	}
	if what := graph.CUDATarget().Lacks(kb.Op); what != "" {
		return nil, fmt.Errorf("cuda: bind %s (%s): no kernel for %s", kb.Op.Name, kb.Op.Kind, what)
	}
	b := &binding{Binding: kb, lib: l, kernel: &kernel{}}
	touches, err := b.Places()
	if err != nil {
		b.failf("%w", err)
		return nil, b.err
	}
	b.kernel.operands = of(&b.Binding, touches)
	if b.onHost() {
		return b.bindHost()
	}
	if kb.Op.Skip != graph.NoBuf {
		if buf := kb.Program.Buf(kb.Op.Skip); buf.DType != graph.I32 || buf.Elems() != 1 {
			b.failf("skip (%s) is %v %v, want one i32", buf.Name, buf.DType, buf.Shape)
		}
		b.skip = b.address("skip", kb.Skip)
	}
	if b.err == nil {
		bind(b)
	}
	if b.err != nil {
		return nil, b.err
	}
	return b.kernel, nil
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
