package blas

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"unsafe"

	"github.com/spillway-ml/spillway/internal/dl"

	"github.com/spillway-ml/spillway/device/cuda/driver"
	"github.com/spillway-ml/spillway/device/cuda/dynlib"
	"github.com/spillway-ml/spillway/graph"
)

// Names are the files of cuBLASLt, the newest first.
var Names = []string{"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so.11", "libcublasLt.so"}

// Constants of cublasLt.h, cublas_api.h and library_types.h.
const (
	cudaR32F  = 0
	cudaR16F  = 2
	cudaR16BF = 14

	compute32F = 68 // fp32 arithmetic and accumulation; no TF32

	opN, opT = 0, 1

	descTransA      = 3
	descTransB      = 4
	descEpilogue    = 7
	descBiasPointer = 8
	descAuxPointer  = 11
	descAuxLd       = 12 // i64, elements
	descAuxType     = 22 // i32; this and the next attribute exist since CUDA 11.8
	descBiasType    = 26

	epilogueDefault = 1
	epilogueBias    = 4
	epilogueGELU    = 32 + 128 // GELU, and its argument in aux
	epilogueDGELU   = 64 + 128
	epilogueBGradA  = 256 // sums over K of cuBLASLt's A; the next one, of its B
	epilogueBGradB  = 512

	prefWorkspaceBytes = 1
	prefReduction      = 3
	prefAlignA         = 5 // alignments of B, C and D are the next three attributes

	// Split-K algorithms must keep partial sums in fp32 in the workspace and add them in a
	// fixed order: not in place with atomics, whose order varies, and not in C's type.
	reductionCompute = 2

	statusInvalidValue = 7
	statusNotSupported = 15
)

var statusNames = map[int]string{
	1: "CUBLAS_STATUS_NOT_INITIALIZED", 3: "CUBLAS_STATUS_ALLOC_FAILED", 7: "CUBLAS_STATUS_INVALID_VALUE",
	8: "CUBLAS_STATUS_ARCH_MISMATCH", 11: "CUBLAS_STATUS_MAPPING_ERROR", 13: "CUBLAS_STATUS_EXECUTION_FAILED",
	14: "CUBLAS_STATUS_INTERNAL_ERROR", statusNotSupported: "CUBLAS_STATUS_NOT_SUPPORTED", 16: "CUBLAS_STATUS_LICENSE_ERROR",
}

func statusError(call string, status uintptr) error {
	code := int(int32(status))
	if code == 0 {
		return nil
	}
	name := statusNames[code]
	if name == "" {
		name = "cublasStatus"
	}
	return &driver.Error{Call: call, Code: code, Name: name}
}

// heuristic is cublasLtMatmulHeuristicResult_t.
type heuristic struct {
	algo      [8]uint64 // cublasLtMatmulAlgo_t
	workspace uintptr   // bytes
	status    int32
	waves     float32
	reserved  [4]int32
}

// symbols are addresses of the library's functions.
type symbols struct {
	version, create, destroy                   uintptr
	descCreate, descDestroy, descSet           uintptr
	layoutCreate, layoutDestroy                uintptr
	preferenceCreate, preferenceFree, prefsSet uintptr
	choose, matmul                             uintptr
}

func (s *symbols) names() map[string]*uintptr {
	return map[string]*uintptr{
		"cublasLtGetVersion": &s.version, "cublasLtCreate": &s.create, "cublasLtDestroy": &s.destroy,
		"cublasLtMatmulDescCreate": &s.descCreate, "cublasLtMatmulDescDestroy": &s.descDestroy, "cublasLtMatmulDescSetAttribute": &s.descSet,
		"cublasLtMatrixLayoutCreate": &s.layoutCreate, "cublasLtMatrixLayoutDestroy": &s.layoutDestroy,
		"cublasLtMatmulPreferenceCreate": &s.preferenceCreate, "cublasLtMatmulPreferenceDestroy": &s.preferenceFree,
		"cublasLtMatmulPreferenceSetAttribute": &s.prefsSet,
		"cublasLtMatmulAlgoGetHeuristic":       &s.choose, "cublasLtMatmul": &s.matmul,
	}
}

// Lt is cuBLASLt.
type Lt struct {
	lib    *dynlib.Library
	sym    symbols
	handle uintptr

	mu     sync.Mutex
	plans  map[Product]*ltPlan
	biased []*ltCall // calls with their own matmul descriptor
}

var _ Library = (*Lt)(nil)

// Open opens cuBLASLt and creates a handle for the context that is current on the calling
// thread. version is the CUDA version of the driver, such as 12040: libraries of a newer
// major version are skipped. 0 accepts any version.
func Open(version int) (*Lt, error) {
	l, err := load(version)
	if err != nil {
		return nil, err
	}
	if err := l.call("cublasLtCreate", l.sym.create, uintptr(unsafe.Pointer(&l.handle))); err != nil {
		return nil, fmt.Errorf("%s: %w", l.lib.Path, err)
	}
	return l, nil
}

func load(version int) (*Lt, error) {
	lib, err := dynlib.Open("cuBLASLt", dynlib.UpTo(version, Names...)...)
	if err != nil {
		return nil, err
	}
	l := &Lt{lib: lib, plans: map[Product]*ltPlan{}}
	if err := lib.Symbols(l.sym.names()); err != nil {
		return nil, err
	}
	return l, nil
}

// Path is the file name of the opened library.
func (l *Lt) Path() string { return l.lib.Path }

// Version is cuBLASLt's version: 120401 for 12.4.1.
func (l *Lt) Version() int {
	v := dl.Call(l.sym.version)
	return int(v)
}

// call calls a cuBLASLt function that returns a status. The directive below moves the
// objects that its arguments point to onto the heap, so that they do not move during the
// call. That allocates: call is for Bind, not for Enqueue.
//
//go:uintptrescapes
func (l *Lt) call(name string, fn uintptr, args ...uintptr) error {
	r := dl.Call(fn, args...)
	return statusError(name, r)
}

// objects is a list of functions that free cuBLASLt objects, last created first.
type objects []func() error

func (o objects) free() error {
	var errs []error
	for i := len(o) - 1; i >= 0; i-- {
		errs = append(errs, o[i]())
	}
	return errors.Join(errs...)
}

// ltPlan is a product and its chosen algorithm. Calls with different addresses share it.
type ltPlan struct {
	desc        uintptr
	a, b, c     uintptr // layouts of cuBLASLt's A, B and C: see plan
	algo        [8]uint64
	one, beta   float32
	workspace   uintptr
	owned       objects
	failed      error
	description func() (uintptr, func() error, error) // creates another descriptor
}

// ltCall is a plan with addresses.
type ltCall struct {
	lib    *Lt
	plan   *ltPlan
	desc   uintptr
	free   func() error // frees desc if it belongs to this call alone
	at     Places
	extra  [2]uint64 // addresses of the bias or sums, and of aux
	workAt uintptr
	args   [16]uintptr // arguments of cublasLtMatmul; the last is the stream
}

// Bind implements Library.
func (l *Lt) Bind(p Product, at Places) (Call, error) {
	if err := p.Validate(at); err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	pl := l.plans[p]
	if pl == nil {
		pl = &ltPlan{}
		if pl.failed = older(p, l.plan(p, pl)); pl.failed != nil {
			pl.failed = fmt.Errorf("%s: %w", p, pl.failed)
			_ = pl.owned.free() // pl.failed is the more useful error
		}
		l.plans[p] = pl
	}
	if pl.failed != nil {
		return nil, pl.failed
	}
	c := &ltCall{lib: l, plan: pl, desc: pl.desc, at: at}
	if pl.workspace > 0 {
		c.workAt = uintptr(at.Work)
	}
	if extra := p.extra(at); len(extra) > 0 {
		var err error
		if c.desc, c.free, err = pl.description(); err != nil {
			return nil, fmt.Errorf("%s: %w", p, err)
		}
		l.biased = append(l.biased, c)
		for i, e := range extra {
			c.extra[i] = uint64(e.at)
			if err := l.set("cublasLtMatmulDescSetAttribute", l.sym.descSet, c.desc, e.attribute, &c.extra[i]); err != nil {
				return nil, fmt.Errorf("%s: %w", p, err)
			}
		}
	}
	c.words()
	return c, nil
}

// set sets an attribute of a cuBLASLt descriptor or preference.
func (l *Lt) set(name string, fn, object uintptr, attribute int, value any) error {
	var p unsafe.Pointer
	var size uintptr
	switch v := value.(type) {
	case *int32:
		p, size = unsafe.Pointer(v), 4
	case *uint32:
		p, size = unsafe.Pointer(v), 4
	case *uint64:
		p, size = unsafe.Pointer(v), 8
	default:
		return fmt.Errorf("%s: attribute of type %T", name, value)
	}
	if err := l.call(name, fn, object, uintptr(attribute), uintptr(p), size); err != nil {
		return fmt.Errorf("attribute %d: %w", attribute, err)
	}
	return nil
}

// older returns ErrUnsupported if the library rejected an epilogue or its attributes, else
// err. Libraries of CUDA 11 reject epilogues that they do not have yet: GELU with aux, its
// derivative, and sums. Before 11.8 the type of sums cannot be set; in 11.6 they are said to
// write out of bounds in some shapes.
func older(p Product, err error) error {
	if (p.GELU || p.DGELU || p.Sums != NoSums) && invalid(err) {
		return fmt.Errorf("%w: %w", ErrUnsupported, err)
	}
	return err
}

// invalid says whether err is cuBLASLt's status for an invalid or unsupported value.
func invalid(err error) bool {
	var status *driver.Error
	return errors.As(err, &status) && status.Code == statusInvalidValue
}

// operand is an operand of an epilogue (bias, sums or aux), with the descriptor attribute
// that holds its address.
type operand struct {
	attribute int
	at        driver.Address
}

// extra returns the operands of a product's epilogue.
func (p Product) extra(at Places) (list []operand) {
	if p.Bias {
		list = append(list, operand{descBiasPointer, at.Bias})
	}
	if p.Sums != NoSums {
		list = append(list, operand{descBiasPointer, at.Sums})
	}
	if p.GELU || p.DGELU {
		list = append(list, operand{descAuxPointer, at.Aux})
	}
	return list
}

// plan describes the product to cuBLASLt, which is column-major: the row-major C (M,N) is
// the column-major Cᵀ (N,M), and Cᵀ = op(B)ᵀ·op(A)ᵀ. So cuBLASLt's A is our B and its B is
// our A, with unchanged transposition flags. cuBLASLt adds its bias to every column of Cᵀ,
// which is every row of C. Its sums of A, one per row of Cᵀ, are the sums of our B, one per
// column of C.
func (l *Lt) plan(p Product, pl *ltPlan) error {
	pl.one = 1
	if p.Accumulate {
		pl.beta = 1
	}
	pl.workspace = uintptr(p.Workspace)
	pl.description = func() (uintptr, func() error, error) { return l.describe(p) }
	desc, free, err := l.describe(p)
	if err != nil {
		return err
	}
	pl.desc = desc
	pl.owned = append(pl.owned, free)
	for _, m := range []struct {
		to         *uintptr
		m          Matrix
		rows, cols int64
	}{{&pl.a, p.B, p.K, p.N}, {&pl.b, p.A, p.M, p.K}, {&pl.c, p.C, p.M, p.N}} {
		if m.m.Trans {
			m.rows, m.cols = m.cols, m.rows
		}
		if err := l.call("cublasLtMatrixLayoutCreate", l.sym.layoutCreate,
			uintptr(unsafe.Pointer(m.to)), dataType(m.m.Type), uintptr(m.cols), uintptr(m.rows), uintptr(m.m.Ld)); err != nil {
			return err
		}
		layout := *m.to
		pl.owned = append(pl.owned, func() error { return l.call("cublasLtMatrixLayoutDestroy", l.sym.layoutDestroy, layout) })
	}
	for _, e := range p.extra(Places{}) { // cuBLASLt checks the alignment of these addresses
		at := uint64(Align)
		if err := l.set("cublasLtMatmulDescSetAttribute", l.sym.descSet, pl.desc, e.attribute, &at); err != nil {
			return err
		}
	}
	return l.chooseAlgorithm(p, pl)
}

func dataType(t graph.DType) uintptr {
	switch t {
	case graph.BF16:
		return cudaR16BF
	case graph.F16:
		return cudaR16F
	}
	return cudaR32F
}

// describe creates a product's matmul descriptor and returns the function that frees it.
func (l *Lt) describe(p Product) (desc uintptr, free func() error, err error) {
	if err := l.call("cublasLtMatmulDescCreate", l.sym.descCreate, uintptr(unsafe.Pointer(&desc)), compute32F, cudaR32F); err != nil {
		return 0, nil, err
	}
	free = func() error { return l.call("cublasLtMatmulDescDestroy", l.sym.descDestroy, desc) }
	op := func(m Matrix) *int32 {
		v := int32(opN)
		if m.Trans {
			v = opT
		}
		return &v
	}
	type setting struct {
		attribute int
		value     any
		known     bool // all versions have the attribute; others behave as if it had this value
	}
	epilogue, ld, typ := uint32(epilogueDefault), uint64(p.N), int32(dataType(p.C.Type))
	settings := []setting{{descTransA, op(p.B), true}, {descTransB, op(p.A), true}, {descEpilogue, &epilogue, true}}
	switch {
	case p.GELU && p.Bias:
		epilogue = epilogueGELU | epilogueBias
	case p.GELU:
		epilogue = epilogueGELU
	case p.DGELU:
		epilogue = epilogueDGELU
	case p.Bias:
		epilogue = epilogueBias
	}
	if p.Sums != NoSums {
		if epilogue = epilogueBGradA; p.Sums == SumsA {
			epilogue = epilogueBGradB
		}
		settings = append(settings, setting{descBiasType, &typ, true})
	}
	if p.GELU || p.DGELU {
		settings = append(settings, setting{descAuxLd, &ld, true}, setting{descAuxType, &typ, false})
	}
	for _, a := range settings {
		err := l.set("cublasLtMatmulDescSetAttribute", l.sym.descSet, desc, a.attribute, a.value)
		if err != nil && (a.known || !invalid(err)) {
			return 0, nil, errors.Join(err, free())
		}
	}
	return desc, free, nil
}

// preference creates cuBLASLt's search preference (workspace, alignment, reductions) and
// returns the function that frees it.
func (l *Lt) preference(p Product) (pref uintptr, free func() error, err error) {
	if err := l.call("cublasLtMatmulPreferenceCreate", l.sym.preferenceCreate, uintptr(unsafe.Pointer(&pref))); err != nil {
		return 0, nil, err
	}
	free = func() error { return l.call("cublasLtMatmulPreferenceDestroy", l.sym.preferenceFree, pref) }
	workspace, reduction, align := uint64(p.Workspace), uint32(reductionCompute), uint32(Align)
	for _, a := range []struct {
		attribute int
		value     any
	}{{prefWorkspaceBytes, &workspace}, {prefReduction, &reduction}, {prefAlignA, &align}, {prefAlignA + 1, &align}, {prefAlignA + 2, &align}, {prefAlignA + 3, &align}} {
		if err := l.set("cublasLtMatmulPreferenceSetAttribute", l.sym.prefsSet, pref, a.attribute, a.value); err != nil {
			return 0, nil, errors.Join(err, free())
		}
	}
	return pref, free, nil
}

func (l *Lt) chooseAlgorithm(p Product, pl *ltPlan) error {
	if l.handle == 0 { // cuBLASLt does not check the handle
		return statusError("cublasLtMatmulAlgoGetHeuristic", 1)
	}
	found, err := l.heuristics(p, pl)
	if err != nil {
		return err
	}
	pl.algo = found[0].algo
	return nil
}

// heuristics returns cuBLASLt's algorithms for a product, the one that it expects to be
// fastest first. The error is ErrUnsupported if there is none.
func (l *Lt) heuristics(p Product, pl *ltPlan) ([]heuristic, error) {
	pref, free, err := l.preference(p)
	if err != nil {
		return nil, err
	}
	var results [8]heuristic
	var count int32
	err = l.call("cublasLtMatmulAlgoGetHeuristic", l.sym.choose, l.handle, pl.desc, pl.a, pl.b, pl.c, pl.c, pref,
		uintptr(len(results)), uintptr(unsafe.Pointer(&results[0])), uintptr(unsafe.Pointer(&count)))
	if e := free(); err == nil {
		err = e
	}
	if status, ok := errors.AsType[*driver.Error](err); ok && status.Code == statusNotSupported {
		return nil, ErrUnsupported
	}
	if err != nil {
		return nil, err
	}
	var found []heuristic
	for _, r := range results[:max(count, 0)] {
		if r.status == 0 && r.workspace <= pl.workspace {
			found = append(found, r)
		}
	}
	if len(found) == 0 {
		return nil, ErrUnsupported
	}
	return found, nil
}

// Candidates binds a product once with each algorithm that cuBLASLt offers, in cuBLASLt's
// order; Bind uses the first. Candidates is for measurements.
func (l *Lt) Candidates(p Product, at Places) ([]Call, error) {
	bound, err := l.Bind(p, at)
	if err != nil {
		return nil, err
	}
	first := bound.(*ltCall)
	l.mu.Lock()
	defer l.mu.Unlock()
	found, err := l.heuristics(p, first.plan)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", p, err)
	}
	var list []Call
	for _, h := range found {
		pl, c := *first.plan, *first
		pl.algo, pl.owned = h.algo, nil
		c.plan, c.free = &pl, nil // all calls share the first call's objects
		c.words()
		list = append(list, &c)
	}
	return list, nil
}

// words fills in cublasLtMatmul's arguments. They point to fields of the call, which is on
// the heap and does not move.
func (c *ltCall) words() {
	p := c.plan
	c.args = [16]uintptr{
		c.lib.handle, c.desc,
		uintptr(unsafe.Pointer(&p.one)), uintptr(c.at.B), p.a, uintptr(c.at.A), p.b,
		uintptr(unsafe.Pointer(&p.beta)), uintptr(c.at.C), p.c, uintptr(c.at.C), p.c,
		uintptr(unsafe.Pointer(&p.algo[0])), c.workAt, p.workspace, 0,
	}
}

// Enqueue adds the product to a stream.
func (c *ltCall) Enqueue(s driver.Stream) error {
	c.args[len(c.args)-1] = uintptr(s)
	r := dl.Call(c.lib.sym.matmul, c.args[:]...)
	runtime.KeepAlive(c)
	if r != 0 {
		return statusError("cublasLtMatmul", r)
	}
	return nil
}

// Close implements Library. The shared library stays loaded: see dynlib.Library.
func (l *Lt) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var errs []error
	for _, c := range l.biased {
		errs = append(errs, c.free())
	}
	for _, p := range l.plans {
		if p.failed == nil {
			errs = append(errs, p.owned.free())
		}
	}
	if l.handle != 0 {
		errs = append(errs, l.call("cublasLtDestroy", l.sym.destroy, l.handle))
	}
	l.plans, l.biased, l.handle = map[Product]*ltPlan{}, nil, 0
	return errors.Join(errs...)
}

// String describes the product for messages.
func (p Product) String() string {
	side := func(m Matrix, name string) string {
		if m.Trans {
			name += "ᵀ"
		}
		return name + " " + m.Type.String()
	}
	s := fmt.Sprintf("product %d×%d×%d (%s, %s, %s)", p.M, p.N, p.K, side(p.A, "A"), side(p.B, "B"), side(p.C, "C"))
	if p.GELU || p.DGELU {
		s += " with " + p.epilogue()
	}
	if p.Sums != NoSums {
		s += " with sums of " + [...]string{SumsA: "A", SumsB: "B"}[p.Sums]
	}
	return s
}

// epilogue names the product's epilogue for messages.
func (p Product) epilogue() string {
	if p.GELU {
		return "GELU"
	}
	return "GELU's derivative"
}
